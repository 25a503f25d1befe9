// The elementary operations of docs/cuda-arithmetic.md: one IEEE float32 rounding per call, and nothing is contracted.
#pragma once
#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;
typedef long long int64;

namespace vs {

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }
constexpr float kLog2e = 1.44269504f;

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ bf16 to_bf16(float v) { return __float2bfloat16_rn(v); }
__device__ __forceinline__ float rounded(float v) { return to_float(to_bf16(v)); }

// 2^x for x up to 126: 0 below -126; NaN stays NaN. Relative error below 2e-7; 2^0 is 1.
__device__ __forceinline__ float exp2_at_most_126(float x) {
  const float shifted = add(x, 12582912.0f);  // 1.5 * 2^23: the nearest whole number stands in the low bits
  const float f = sub(x, sub(shifted, 12582912.0f));
  float p = 1.3264726149e-3f;
  p = fused(p, f, 9.6715129912e-3f);
  p = fused(p, f, 5.5507335812e-2f);
  p = fused(p, f, 2.4022242427e-1f);
  p = fused(p, f, 6.9314700365e-1f);
  p = fused(p, f, 1.0f);
  const float scale = __int_as_float((__float_as_int(shifted) - 0x4B400000 + 127) << 23);
  const float y = mul(p, scale);  // whatever x is, so that there is no branch
  return x < -126.0f ? 0.0f : y;
}

// The same for any x: 2^126 above 126.
__device__ __forceinline__ float exp2_ieee(float x) { return exp2_at_most_126(x > 126.0f ? 126.0f : x); }

__device__ __forceinline__ float silu(float g) { return div(g, add(1.0f, exp2_ieee(mul(g, -kLog2e)))); }

// The tanh form of GELU: g / (1 + e^(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3).
__device__ __forceinline__ float gelu(float g) {
  return div(g, add(1.0f, exp2_ieee(mul(g, fused(mul(g, g), -0.10294324f, -2.3022082f)))));
}

__device__ __forceinline__ float activated(float g) {
#ifdef GELU
  return gelu(g);
#else
  return silu(g);
#endif
}

// The norm's factor from the sum of squares: 1 / sqrt(ss / d + eps).
__device__ __forceinline__ float norm_factor(float ss, float inverse_d, float eps) {
  return div(1.0f, __fsqrt_rn(fused(ss, inverse_d, eps)));
}

// Sum over the warp's lanes as a tree of neighbours; every lane gets it.
__device__ __forceinline__ float warp_tree(float v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) v = add(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

// Tree of neighbours over COUNT registers, COUNT a power of two.
template <int COUNT>
__device__ __forceinline__ float register_tree(float* v) {
#pragma unroll
  for (int width = COUNT / 2; width > 0; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] = add(v[2 * i], v[2 * i + 1]);
  return v[0];
}

__host__ __device__ constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// The sums of squares of ROWS rows by one warp, from their D / 16 nodes each; a null pointer is a row that is not there.
template <int D, int ROWS>
__device__ __forceinline__ void sums_of_nodes(const float* const* nodes, float* sums, int lane) {
  constexpr int kNodes = D / 16, kPer = power_of_two(kNodes) < 32 ? 1 : power_of_two(kNodes) / 32;
  float v[ROWS][kPer];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      v[r][i] = nodes[r] != nullptr && lane * kPer + i < kNodes ? nodes[r][lane * kPer + i] : 0.0f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = warp_tree(register_tree<kPer>(v[r]));
}

// Parts of K added as a tree of neighbours: p0, p0 + p1, (p0 + p1) + p2, (p0 + p1) + (p2 + p3).
template <int COUNT>
__device__ __forceinline__ float tree_of_parts(const float* p) {
  if (COUNT == 1) return p[0];
  const float low = add(p[0], p[COUNT > 1 ? 1 : 0]);
  if (COUNT == 2) return low;
  if (COUNT == 3) return add(low, p[COUNT > 2 ? 2 : 0]);
  return add(low, add(p[COUNT > 2 ? 2 : 0], p[COUNT > 3 ? 3 : 0]));
}

// One k16 step of the chain: d (16x8, float32) += a (16x16) b (16x8).
__device__ __forceinline__ void mma(float* d, const unsigned* a, const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy16(unsigned to, const void* from, bool wanted) {  // zeros where it is not wanted
  // No memory clobber: loads of addresses may be moved across; commit and wait keep everything else in place.
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0));
}
__device__ __forceinline__ void copy16_cached(unsigned to, const void* from) {  // through L1: other warps want it too
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from));
}
// For what nobody reads again: the L2 cache gives it up first, and keeps what all blocks read.
__device__ __forceinline__ unsigned long long read_once() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy16_once(unsigned to, const void* from, bool wanted, unsigned long long policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;\n" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0),
               "l"(policy));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}

// Launch-ahead: the next kernel of the stream may start now; this one may read what earlier kernels of the pass wrote.
__device__ __forceinline__ void release_next() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

// Whether a pass has no row but padding, so that nobody wants its products and draws. The kernels that make the pass's rows say so
// before its embedding, which everything behind waits for: it may be read before the wait.
__device__ __forceinline__ bool is_idle(const int* busy) { return busy != nullptr && *busy == 0; }

// All threads of the cluster's blocks that have not ended: what they wrote before, they may read of each other behind it.
__device__ __forceinline__ void meet_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
// Into the shared memory of another block of the cluster, at the same place as here.
__device__ __forceinline__ void put_there(float* at, int rank, float value) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2; }\n" ::"r"(
                   shared_address(at)),
               "r"(rank), "f"(value)
               : "memory");
}

}  // namespace vs
