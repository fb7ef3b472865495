/* SPDX-License-Identifier: Apache-2.0 */
/* The sums of compare/measure.py over two tensors, in one reading.
 *
 * Elements are widened to double, and summed in eight lanes a block. Blocks that are bitwise equal
 * contribute to the norm alone.
 */

#include <stdint.h>
#include <string.h>

const uint32_t ttrace_source = TTRACE_SOURCE; /* the CRC-32 of this file */

#define LANES 8
#define MOST 16 /* dimensions */
#define BLOCK 2048 /* elements: both sides of it stay in a core's first-level cache */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

typedef double doubles __attribute__((vector_size(8 * LANES), aligned(8)));
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int64_t longs __attribute__((vector_size(8 * LANES), aligned(8)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

#define WIDE_FLOAT(p) __builtin_convertvector(*(const floats *)(p), doubles)
#define WIDE_DOUBLE(p) (*(const doubles *)(p))
#define BITS_BFLOAT16(p) (__builtin_convertvector(*(const halves *)(p), words) << 16)
#define WIDE_BFLOAT16(p) __builtin_convertvector((floats)BITS_BFLOAT16(p), doubles)

/* diff, reference, candidate, dot, worst */
typedef struct { double of[5]; } sums;

static double total(const doubles *lanes) {
  double found = 0;
  for (int i = 0; i < LANES; i++) found += (*lanes)[i];
  return found;
}

#define PASS(NAME, TYPE, WIDE)                                                                   \
  FOR_EACH_PROCESSOR                                                                             \
  static void NAME(const TYPE *c, const TYPE *r, int64_t n, double by, int same, sums *out) {    \
    doubles cc = {0}, rr = {0}, cr = {0}, dd = {0}, most = {0};                                  \
    TYPE ends[2][LANES];                                                                         \
    for (int64_t i = 0; i < n; i += LANES) {                                                     \
      const TYPE *at_c = c + i, *at_r = r + i;                                                   \
      if (n - i < LANES) {                                                                       \
        memset(ends, 0, sizeof ends);                                                            \
        at_c = memcpy(ends[0], at_c, (n - i) * sizeof(TYPE));                                    \
        at_r = memcpy(ends[1], at_r, (n - i) * sizeof(TYPE));                                    \
      }                                                                                          \
      doubles y = WIDE(at_r);                                                                    \
      rr += y * y;                                                                               \
      if (same) continue;                                                                        \
      doubles x = WIDE(at_c) * by;                                                               \
      doubles d = x - y;                                                                         \
      cc += x * x;                                                                               \
      cr += x * y;                                                                               \
      dd += d * d;                                                                               \
      d = (doubles)((longs)d & INT64_MAX);                                                       \
      longs more = d > most;                                                                     \
      most = (doubles)(((longs)d & more) | ((longs)most & ~more));                               \
    }                                                                                            \
    double norm = total(&rr);                                                                    \
    out->of[0] += total(&dd);                                                                    \
    out->of[1] += norm;                                                                          \
    out->of[2] += same ? norm : total(&cc);                                                      \
    out->of[3] += same ? norm : total(&cr);                                                      \
    for (int i = 0; i < LANES; i++)                                                              \
      if (most[i] > out->of[4]) out->of[4] = most[i];                                            \
  }

PASS(pass_float, float, WIDE_FLOAT)
PASS(pass_double, double, WIDE_DOUBLE)
PASS(pass_bfloat16, uint16_t, WIDE_BFLOAT16)

static int row_sums(const char *c, const char *r, int64_t size, int64_t columns, double by,
                    sums *out) {
  int equal = 1;
  for (int64_t at = 0; at < columns; at += BLOCK) {
    int64_t n = columns - at < BLOCK ? columns - at : BLOCK;
    const void *here = c + at * size, *there = r + at * size;
    int same = !memcmp(here, there, n * size);
    equal &= same;
    same &= by == 1.0;
    if (size == 4) pass_float(here, there, n, by, same, out);
    else if (size == 8) pass_double(here, there, n, by, same, out);
    else pass_bfloat16(here, there, n, by, same, out);
  }
  return equal;
}

/* Adds to `out`; returns whether all bits are equal.
 *
 * size: bytes of an element; 2 is bfloat16.
 * by: what the candidate's elements are multiplied by.
 * dims: size of each dimension, then the candidate's strides, then the reference's, in elements.
 *   Elements of the last dimension are neighbours. */
int ttrace_sums(const char *c, const char *r, int64_t size, double by, int64_t count,
                const int64_t *dims, sums *out) {
  if (count == 1) return row_sums(c, r, size, dims[0], by, out);
  int equal = 1;
  int64_t at[MOST] = {0};
  for (;;) {
    equal &= row_sums(c, r, size, dims[count - 1], by, out);
    int64_t dim = count - 2;
    for (; dim >= 0; dim--) {
      int64_t of_c = dims[count + dim] * size, of_r = dims[2 * count + dim] * size;
      c += of_c;
      r += of_r;
      if (++at[dim] < dims[dim]) break;
      c -= of_c * dims[dim];
      r -= of_r * dims[dim];
      at[dim] = 0;
    }
    if (dim < 0) return equal;
  }
}
