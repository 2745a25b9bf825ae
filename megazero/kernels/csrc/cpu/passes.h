// Passes over a row or over flat memory: elementwise maps, sums, maxima.
//
// A pass calls a function with the position of an element (One, First or Second). bfloat16 is processed in pairs: a
// pair is one 32-bit word; a shift widens its first element and a mask its second, and two results are packed into one
// word. Element by element it takes twice as many instructions, which limit 16-bit passes more than the memory does.

#pragma once

#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common.h"

namespace {

constexpr int kLanes = 64;  // independent fp32 accumulators of a sum: four vectors of AVX-512
template <typename T>
constexpr bool kPaired = std::is_same_v<T, BFloat16> && std::endian::native == std::endian::little;

// Positions: element i; the first and the second element of pair i.
struct One {
  int64_t i;
};
struct First {
  int64_t i;
};
struct Second {
  int64_t i;
};

INLINE uint32_t word_of(const BFloat16* x, int64_t pair) {
  uint32_t word;
  std::memcpy(&word, x + 2 * pair, sizeof word);
  return word;
}

template <typename T>
INLINE float wide(const T* x, One at) {
  return wide(x[at.i]);
}
INLINE float wide(const BFloat16* x, First at) { return std::bit_cast<float>(word_of(x, at.i) << 16); }
INLINE float wide(const BFloat16* x, Second at) { return std::bit_cast<float>(word_of(x, at.i) & 0xFFFF0000); }

// Returns the index of the element at a position.
INLINE int64_t index(One at) { return at.i; }
INLINE int64_t index(First at) { return 2 * at.i; }
INLINE int64_t index(Second at) { return 2 * at.i + 1; }

// Returns where the fp32 number of an element is stored, of n: if T is paired, all firsts come before all seconds.
template <typename T>
INLINE int64_t place(First at, int64_t) {
  return at.i;
}
template <typename T>
INLINE int64_t place(Second at, int64_t n) {
  return (n + 1) / 2 + at.i;
}
template <typename T>
INLINE int64_t place(One at, int64_t n) {
  return !kPaired<T> ? at.i : at.i % 2 ? place<T>(Second{at.i / 2}, n) : at.i / 2;
}

// Returns the index of the element whose number is stored at `place`: the inverse of `place`.
template <typename T>
INLINE int64_t element_at(int64_t place, int64_t n) {
  const int64_t firsts = (n + 1) / 2;
  return !kPaired<T> ? place : place < firsts ? 2 * place : 2 * (place - firsts) + 1;
}

// y[k][i] = f(position of i)[k] for i < n, rounded; f may read y. Each NaN of f must be one that `rounded` keeps.
template <typename T, size_t kResults, typename F>
INLINE void map(int64_t n, const std::array<T*, kResults>& y, F f) {
  int64_t done = 0;
  if constexpr (kPaired<T>) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n / 2; ++i) {
      const auto first = f(First{i}), second = f(Second{i});
      for (size_t k = 0; k < kResults; ++k) {
        const uint32_t word = rounded(first[k]) >> 16 | (rounded(second[k]) & 0xFFFF0000);
        std::memcpy(y[k] + 2 * i, &word, sizeof word);
      }
    }
    done = n / 2 * 2;
  }
#pragma GCC ivdep
  for (int64_t i = done; i < n; ++i) {
    const auto results = f(One{i});
    for (size_t k = 0; k < kResults; ++k) y[k][i] = narrow<T>(results[k]);
  }
}

template <typename T, typename F>
INLINE void map(int64_t n, T* y, F f) {
  map(n, std::array{y}, [&](auto at) { return std::array{f(at)}; });
}

// Prefetches n elements; they need not exist.
template <typename T>
INLINE void fetch(const T* x, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(x + i);
}

// Calls f(position of i, lane) for i below the last multiple of kLanes, and returns that. The lane depends only on i.
template <typename T, typename F>
INLINE int64_t in_lanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if constexpr (kPaired<T>) {
      for (int lane = 0; lane < kLanes / 2; ++lane) f(First{i / 2 + lane}, lane);
      for (int lane = 0; lane < kLanes / 2; ++lane) f(Second{i / 2 + lane}, kLanes / 2 + lane);
    } else {
      for (int lane = 0; lane < kLanes; ++lane) f(One{i + lane}, lane);
    }
  }
  return i;
}

// Reduces the lanes to one number, by halves. The compiler would not vectorize the last 16, so they are written as
// vectors of four, which every machine has.
template <typename F>
INLINE float merge(float* lanes, F f) {
  typedef float Four __attribute__((vector_size(16)));
  for (int lane = 0; lane < kLanes / 2; ++lane) lanes[lane] = f(lanes[lane], lanes[lane + kLanes / 2]);
  for (int lane = 0; lane < kLanes / 4; ++lane) lanes[lane] = f(lanes[lane], lanes[lane + kLanes / 4]);
  static_assert(kLanes == 64);
  Four q[4];
  std::memcpy(q, lanes, sizeof q);
  const Four last = f(f(q[0], q[2]), f(q[1], q[3]));
  return f(f(last[0], last[2]), f(last[1], last[3]));
}
INLINE float sum_lanes(float* lanes) {
  return merge(lanes, [](auto a, auto b) { return a + b; });
}

// Sums term(position of i) for i < n. The remainder has lanes of its own, so that the compiler vectorizes its addition.
template <typename T, typename F>
INLINE float sum_of(int64_t n, F term) {
  float sums[kLanes] = {}, rest[kLanes] = {};
  const int64_t whole = in_lanes<T>(n, [&](auto at, int lane) { sums[lane] += term(at); });
  for (int64_t i = whole; i < n; ++i) rest[i - whole] = term(One{i});
  for (int lane = 0; lane < kLanes; ++lane) sums[lane] += rest[lane];
  return sum_lanes(sums);
}

// Computes two sums in one pass over the memory: `terms` adds to its last two arguments.
template <typename T, typename F>
INLINE std::pair<float, float> two_sums_of(int64_t n, F terms) {
  float first[kLanes] = {}, second[kLanes] = {}, rest[kLanes] = {}, more[kLanes] = {};
  const int64_t whole = in_lanes<T>(n, [&](auto at, int lane) { terms(at, first[lane], second[lane]); });
  for (int64_t i = whole; i < n; ++i) terms(One{i}, rest[i - whole], more[i - whole]);
  for (int lane = 0; lane < kLanes; ++lane) first[lane] += rest[lane], second[lane] += more[lane];
  return {sum_lanes(first), sum_lanes(second)};
}

// Returns the largest of `lowest` and term(position of i) for i < n. Ignores NaN.
template <typename T, typename F>
INLINE float largest_of(int64_t n, float lowest, F term) {
  const auto larger = [](auto a, auto b) { return b > a ? b : a; };
  float most[kLanes], rest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) most[lane] = rest[lane] = lowest;
  const int64_t whole = in_lanes<T>(n, [&](auto at, int lane) { most[lane] = larger(most[lane], term(at)); });
  for (int64_t i = whole; i < n; ++i) rest[i - whole] = larger(lowest, term(One{i}));
  for (int lane = 0; lane < kLanes; ++lane) most[lane] = larger(most[lane], rest[lane]);
  return merge(most, larger);
}

}  // namespace
