// What the reader can choose: an episode, a question, a place in the transcript.
let chosen = -1;
let answered = shown.answers.length ? 0 : -1;
const current = () => episodes[chosen];

function verdict(answer) {
  if (answer.exact === null) return null;
  const mark = make("span", answer.exact ? "verdict right" : "verdict wrong",
    answer.exact ? "\u2713" : "\u2717");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", answer.exact ? "as expected" : "not as expected");
  return mark;
}

function drawAsked() {
  const answer = shown.answers[answered];
  if (!answer) return;
  const differs = answer.expected && !answer.exact;
  byId("asked").replaceChildren(
    make("p", "question", answer.question),
    make("p", "answer", answer.answer || "(no answer)", verdict(answer)),
    make("p", "source", several ? `answered from episode ${answer.episode + 1}` : "",
      differs ? `${several ? ", " : ""}expected: ${answer.expected}` : ""));
}

function drawAnswers() {
  if (shown.answers.length < 2) return;
  const list = make("ol", "");
  shown.answers.forEach((answer, index) => {
    const button = make("button", "",
      make("span", "question", answer.question),
      make("span", "answer", answer.answer || "(no answer)",
        answer.expected && !answer.exact ? make("i", "", `expected ${answer.expected}`) : null),
      several ? make("span", "from", `ep. ${answer.episode + 1}`) : null, verdict(answer));
    button.type = "button";
    button.addEventListener("click", () => {
      answered = index;
      drawAsked();
      choose(answer.episode);
      mark();
    });
    list.append(make("li", "", button));
  });
  const scored = shown.answers.filter((answer) => answer.exact !== null);
  const right = scored.filter((answer) => answer.exact).length;
  byId("answers").append(make("h2", "", "Questions",
    scored.length ? make("span", "", `${right} of ${scored.length} as expected`) : null), list);
}

function mark() {
  [...byId("answers").querySelectorAll("button")].forEach((button, index) => {
    button.classList.toggle("here", shown.answers[index].episode === chosen);
    button.setAttribute("aria-current", index === answered);
  });
}

function choose(index) {
  if (index === chosen) return;
  chosen = index;
  rail.tabs.forEach((tab, each) => {
    tab.setAttribute("aria-selected", each === index);
    tab.tabIndex = each === index ? 0 : -1;
  });
  const title = several ? `Episode ${index + 1}` : "Transcript";
  byId("heading").replaceChildren(
    make("h2", "", title, several ? make("span", "", current().name) : null), drawLegend());
  drawMap(current());
  drawPrompt(current());
  mark();
  reshade();
}

const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };

function step(event) {
  const vertical = event.key === "ArrowUp" || event.key === "ArrowDown";
  const onTab = event.target.closest?.("[role=tab]");
  if (!(event.key in STEPS) || (vertical && !onTab)) return;
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (event.target.closest?.(".wide")) return;
  event.preventDefault();
  choose((chosen + STEPS[event.key] + episodes.length) % episodes.length);
  if (onTab) rail.tabs[chosen].focus();
}

drawHead();
drawAsked();
drawAnswers();
const rail = drawRail(choose, seek);
const reshade = layTranscript(current);
choose(shown.answers[0]?.episode ?? 0);
followView(rail.view);
followPointer(current);
addEventListener("keydown", step);
const fit = () => document.documentElement.style.setProperty("--rail", `${byId("rail").offsetHeight}px`);
new ResizeObserver(fit).observe(byId("rail"));
