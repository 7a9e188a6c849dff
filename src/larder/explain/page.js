"use strict";

// The data and the small tools that every part of the page draws with.
const shown = JSON.parse(document.getElementById("explanation").textContent);
const DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
const VALUE = new Map([...DIGITS].map((digit, value) => [digit, value]));
const SVG = "http://www.w3.org/2000/svg";

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const byId = (id) => document.getElementById(id);

// Text enters the document here and nowhere else, as text.
function make(tag, className, ...inside) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...inside.filter((part) => part !== null && part !== ""));
  return element;
}

function draw(tag, attributes, ...inside) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

function shade(element, share) {
  element.style.setProperty("--s", share.toFixed(3));
  return element;
}

function decode(text, width) {
  const counts = new Uint32Array(text.length / width);
  for (let index = 0; index < text.length; index++) {
    const slot = Math.floor(index / width);
    counts[slot] = counts[slot] * DIGITS.length + VALUE.get(text[index]);
  }
  return counts;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const count = (number) => number.toLocaleString("en-US");
const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

function percent(share) {
  const points = share * 100;
  return `${points.toFixed(points < 9.95 && points > 0 ? 1 : 0)} %`;
}

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (number >= 1024 && power < units.length - 1) {
    number /= 1024;
    power += 1;
  }
  return `${power ? number.toPrecision(number >= 1000 ? 4 : 3) : number} ${units[power]}`;
}

const HEADS = shown.heads_total;
const TOKENS = sum(shown.messages.map((message) => message.tokens.length));
const episodes = shown.episodes.map((episode, index) => ({
  ...episode,
  index,
  kept: decode(episode.kept, shown.heads_width),
  layers: episode.layers.map((row) => decode(row, shown.layer_width)),
  entries: sum(episode.lengths.map(sum)),
}));
const several = episodes.length > 1;

// Where sessions begin, for the transcript's headings and the overview's ticks.
const starts = [];
const sessions = [];
let position = 0;
let date = "";
for (const message of shown.messages) {
  const opens = message.role === "system" || (message.date !== "" && message.date !== date);
  if (opens) sessions.push(position);
  date = message.date || date;
  starts.push(position);
  position += message.tokens.length;
}
