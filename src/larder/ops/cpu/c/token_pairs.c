/* Pairs of tokens whose texts, one behind the other, are another token of a vocabulary. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FACTOR 0x9E3779B97F4A7C15u /* of the hash, a polynomial of bytes modulo 2**64 */

struct vocabulary {
    const uint8_t *text;
    const int64_t *starts;
    int32_t *slots;
    uint64_t mask;
};

static uint64_t slot_of(uint64_t hash) { return (hash ^ hash >> 32) * FACTOR >> 20; }

/* Number of the token with a text, or -1. */
static int32_t find_token(const struct vocabulary *words, const uint8_t *text, int64_t length,
                          uint64_t hash) {
    for (uint64_t slot = slot_of(hash) & words->mask;; slot = (slot + 1) & words->mask) {
        int32_t token = words->slots[slot];
        if (token < 0)
            return -1;
        int64_t start = words->starts[token];
        if (words->starts[token + 1] - start == length &&
            !memcmp(words->text + start, text, (size_t)length))
            return token;
    }
}

static void add_token(const struct vocabulary *words, int32_t token, uint64_t hash) {
    uint64_t slot = slot_of(hash) & words->mask;
    while (words->slots[slot] >= 0)
        slot = (slot + 1) & words->mask;
    words->slots[slot] = token;
}

/* Hashes of the first bytes of a text, up to all of them. */
static void hash_starts(const uint8_t *text, int64_t length, uint64_t *hashes) {
    hashes[0] = 0;
    for (int64_t n = 0; n < length; n++)
        hashes[n + 1] = hashes[n] * FACTOR + text[n] + 1;
}

/* Pairs of one token, the longest first part first; returns their number. */
static int64_t pairs_of(const struct vocabulary *words, const uint8_t *text, int64_t length,
                        const uint64_t *hashes, const uint64_t *powers, int32_t *pairs) {
    int64_t found = 0;
    for (int64_t cut = length - 1; cut > 0; cut--) {
        if ((text[cut] & 0xC0) == 0x80) /* inside a character */
            continue;
        int32_t left = find_token(words, text, cut, hashes[cut]);
        if (left < 0)
            continue;
        uint64_t rest = hashes[length] - hashes[cut] * powers[length - cut];
        int32_t right = find_token(words, text + cut, length - cut, rest);
        if (right < 0)
            continue;
        pairs[2 * found] = left;
        pairs[2 * found++ + 1] = right;
    }
    return found;
}

/* Pairs of all tokens, in the order of the tokens, the longest first part first.
 *
 * text: the tokens in UTF-8, one behind the other, each another.
 * starts: of the tokens, and the end of the last.
 * longest: bytes of the longest token.
 * pairs: room for as many pairs as there are bytes.
 *
 * Returns the number of pairs, or -1 if memory is short. */
int64_t larder_token_pairs(const uint8_t *text, const int64_t *starts, int32_t count,
                           int64_t longest, int32_t *pairs) {
    uint64_t size = 4;
    while (size < 2 * (uint64_t)count)
        size *= 2;
    struct vocabulary words = {text, starts, malloc(size * sizeof(int32_t)), size - 1};
    uint64_t *hashes = malloc(2 * (size_t)(longest + 1) * sizeof *hashes);
    int64_t found = -1;
    if (words.slots && hashes) {
        uint64_t *powers = hashes + longest + 1;
        powers[0] = 1;
        for (int64_t n = 0; n < longest; n++)
            powers[n + 1] = powers[n] * FACTOR;
        memset(words.slots, 0xFF, size * sizeof(int32_t));
        for (int32_t token = 0; token < count; token++) {
            int64_t length = starts[token + 1] - starts[token];
            hash_starts(text + starts[token], length, hashes);
            add_token(&words, token, hashes[length]);
        }
        found = 0;
        for (int32_t token = 0; token < count; token++) {
            int64_t length = starts[token + 1] - starts[token];
            hash_starts(text + starts[token], length, hashes);
            found += pairs_of(&words, text + starts[token], length, hashes, powers,
                              pairs + 2 * found);
        }
    }
    free(words.slots);
    free(hashes);
    return found;
}
