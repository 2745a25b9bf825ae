// fp16 as the kernels use it.
#pragma once
#include <bit>
#include <cstdint>

struct __half {
  uint16_t bits;
};

inline float __half2float(__half x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
inline __half __float2half_rn(float x) { return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))}; }
