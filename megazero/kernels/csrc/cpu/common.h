// Shared by all CPU kernels: number types, the exponential, macros that compile a loop for several CPUs.
//
// Each kernel is an always-inlined template over its number type, and one plain function for each type
// (FOR_EVERY_TYPE). On x86-64 that function is compiled for AVX-512, AVX2 and the baseline, and the best version is
// picked when the library is loaded. Loops have no branches and add in lanes, so that the compiler vectorizes them.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU
#endif
#if defined(__GNUC__) && !defined(__clang__)
#define EXACT __attribute__((optimize("fp-contract=off")))  // fuse only the multiply-adds that are written out
#else
#define EXACT
#endif
#define INLINE inline __attribute__((always_inline))
#define FOR_EVERY_TYPE(KERNEL) KERNEL(float) KERNEL(BFloat16) KERNEL(Half)

namespace {

constexpr int64_t kGrain = 1 << 15;  // least number of elements for which a thread pays off

// 16-bit floats, stored as bits. Rounding is to nearest, ties to even, as in torch; a NaN stays a NaN.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

INLINE float wide(float x) { return x; }
INLINE float wide(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
// Uses integers, because the compiler does not vectorize its built-in conversion. The shift moves exponent and mantissa
// to their places in fp32; the factor 2^112 corrects the exponent bias, for subnormal numbers too.
INLINE float wide(Half x) {
  const uint32_t bits = x.bits;
  const uint32_t magnitude = (bits & 0x7FFF) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t value = magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : finite;
  return std::bit_cast<float>(value | (bits & 0x8000) << 16);
}

// Returns x rounded to bfloat16, in the upper half of the result. A NaN whose lower half is 0 stays a NaN, because
// there is no carry: arithmetic makes such NaNs and passes on those of widened numbers. Other NaNs may overflow.
INLINE uint32_t rounded(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits + 0x7FFF + (bits >> 16 & 1);
}
// Returns x, or for any NaN the quiet NaN. Apply it to each fp32 argument of a value that is then `rounded`.
INLINE float plain(float x) { return x == x ? x : std::numeric_limits<float>::quiet_NaN(); }

template <typename T>
INLINE T narrow(float x);
template <>
INLINE float narrow<float>(float x) {
  return x;
}
template <>
INLINE BFloat16 narrow<BFloat16>(float x) {
  return {static_cast<uint16_t>(x != x ? 0x7FC0 : rounded(x) >> 16)};
}
// Rounds normal numbers like bfloat16's. For smaller ones, adding 1/2 aligns a subnormal's last place with fp32's.
template <>
INLINE Half narrow<Half>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
  uint32_t value = magnitude < 0x38800000 ? small : normal;
  value = magnitude >= 0x477FF000 ? 0x7C00 : value;
  value = magnitude > 0x7F800000 ? 0x7E00 : value;
  return {static_cast<uint16_t>(value | (bits >> 16 & 0x8000))};
}

template <typename T>
constexpr float kLowest = 0;
template <>
constexpr float kLowest<float> = std::numeric_limits<float>::lowest();
template <>
constexpr float kLowest<BFloat16> = -0x1.FEp127f;
template <>
constexpr float kLowest<Half> = -65504.0f;

// Returns e^x for x <= 0 or NaN (x up to 88 works too), and 0 where e^x is not a normal number. The error is about 1
// ulp and 2e-8 |x| (5e-8 |x| on CPUs without multiply-adds). e^x = 2^n p(f) with x log2(e) = n + f, |f| <= 1/2. Adding
// 1.5 x 2^23 rounds to the integer n and leaves n in the lowest bits; the added 127 is the bias of fp32's exponent.
// p(0) = 1, and p is off by at most 9.2e-8; it is evaluated in independent parts, because a long chain of operations
// waits more than it computes. All kernels use this function, with -|x| where x may be positive: clamping x before the
// call would make the compiler fold constants into blends.
INLINE float exponential_or_zero(float x) {
  constexpr float kLog2E = 1.44269504088896341f, kShift = 0x1.8p23f + 127.0f;
  const float shifted = x * kLog2E + kShift;
  const float f = x * kLog2E - (shifted - kShift);
  const float f2 = f * f;
  float p = 1.326472731e-03f * f + 9.671512991e-03f;
  p = p * f2 + (5.550733581e-02f * f + 2.402224243e-01f);
  p = p * f2 + (6.931470037e-01f * f + 1.0f);
  p *= std::bit_cast<float>(std::bit_cast<uint32_t>(shifted) << 23);
  return x < -87.0f ? 0.0f : p;
}

}  // namespace
