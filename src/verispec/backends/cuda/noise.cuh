// Philox4x32-10, as verispec/sampling/noise.py has it.
#pragma once

__device__ __forceinline__ uint4 philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned k0, unsigned k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
    const unsigned high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

__device__ __forceinline__ unsigned word_of(uint4 words, int lane) {
  return lane == 0 ? words.x : lane == 1 ? words.y : lane == 2 ? words.z : words.w;
}

// The counter's last word: what the noise is for, and the node of a draft it belongs to.
enum Domain { kTokenNoise, kCoin, kDraftNoise, kResidual };
constexpr int kNodeStride = 256;
__device__ __forceinline__ int stream_of(Domain domain, int node) { return domain + kNodeStride * node; }
