"""The draw, exactly: constants and the order of operations that every twin follows.

All arithmetic below is IEEE fp32, one rounding for each operation written (no fused
multiply-add), and integers; so twins agree bit for bit, and neither batch nor thread nor tile
changes a result. Given the processed logits z of one row and m, their maximum:

    distance  y = (m - z) * (1 / temperature)          below 0 never; -inf logits give +inf
    weight    w = floor(2^40 * exp(-y))                as int64: sums are exact in any order
    noise     E = -log(1 - t),  t = (b + 1/2) * 2^-31  b: the upper 31 of 32 random bits
    token     argmin of E * exp(y) over the survivors  equal ones: the lowest id

That is Gumbel-max without its outer logarithm: -log(E) is a Gumbel variate, and the token of
the least E * exp(y) has probability exp(-y) / sum exp(-y). Survivors are, one after the other,

    min-p     y <= -log(min_p)
    top-k     fewer than k tokens have a smaller y     ties with the k-th stay
    top-p     w of all tokens with a smaller y, as a share of the w of all tokens left by the
              two filters above, is less than top_p    (the product is taken in fp64)

Each keeps all tokens up to some distance and none beyond, so a winner among a superset that
survives the filters is the winner among the survivors: no sort is needed. Tokens with y > 87
are never drawn (their probability is below 2^-125).

Random bits: word `v mod 4` of Philox4x32-10 with key = the 64-bit seed (low word first) and
counter = (v div 4, position, choice, DOMAIN) for token id v. `position` is the number of
tokens, prompt included, before the one to draw.

    exp(a)        n = (a * LOG2_E + ROUND) - ROUND;  r = (a - n * LN2_HIGH) - n * LN2_LOW;
                  Horner over EXP in r;  times 2^n through the exponent bits
    -log(1 - t)   t <= 1/2: k = 0, f = t;  else s = 1 - t = 2^-k * (1 - f), 0 < f <= 1/2, exactly;
                  k * LN2 + f * Horner over LOG in f;  t is at most 1 - 2^-24
"""

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
DOMAIN = 0x6B767264  # "kvrd": other uses of a request's seed take another constant

MAX_DISTANCE = 87.0
WEIGHT_ONE = 2.0**40

LOG2_E = 1.442695
ROUND = 12582912.0  # 1.5 * 2^23: adding and taking it away rounds to the nearest integer
LN2_HIGH = 0.693359375  # few bits: n * LN2_HIGH is exact
LN2_LOW = -0.00021219444
LN2 = 0.6931472

# Highest power first; least relative error on |r| <= ln(2) / 2 (3e-9 before rounding)
EXP = (0.001381388, 0.008369063, 0.041668423, 0.16666518, 0.49999994, 1.0, 1.0)
# -log(1 - f) / f on 0 < f <= 1/2 (2.3e-8 before rounding)
LOG = (
    1.4411062,
    -1.6958085,
    1.2576671,
    -0.20353779,
    0.2696125,
    0.24280511,
    0.33370063,
    0.49999285,
    1.0,
)
T_MAX = 1.0 - 2.0**-24
