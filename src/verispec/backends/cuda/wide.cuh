// Tensor-core steps of 64 rows, by four warps together (`wgmma`, sm_90a): the same k16 chains as `mma`, whose second operand is
// read from shared memory. A thread's results stand where `mma` has those of the warp's 16 rows. Tiles of the second operand are
// columns of 64 values (128 bytes), one column behind the other; its rows are swizzled by `wide_offset`, and every tile begins
// at a multiple of 1024 bytes.
#pragma once
#include "arithmetic.cuh"

typedef unsigned long long uint64;

namespace vs {

constexpr int kWideColumn = 128;  // bytes of a row in one column

// Chunk `chunk` (16 bytes) of row `row` of a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ int wide_offset(int row, int chunk) {
  return chunk / 8 * ROWS * kWideColumn + row * kWideColumn + ((chunk % 8 ^ (row & 7)) << 4);
}

// `stride`: from one column to the next, where rows are summed over. `eight`: from eight rows to the next eight.
__device__ __forceinline__ uint64 wide_operand(unsigned address, int stride, int eight = 8 * kWideColumn) {
  return static_cast<uint64>((address & 0x3ffff) >> 4) | static_cast<uint64>(stride >> 4) << 16 |
         static_cast<uint64>(eight >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ uint64 wide_further(uint64 operand, int nbytes) { return operand + (nbytes >> 4); }

__device__ __forceinline__ void wide_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wide_done() {  // but for the last so many that were committed
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void wide_wait() {
  wide_commit();
  wide_done<0>();
}
// What this thread has written to shared memory may be read by such steps, behind a barrier.
__device__ __forceinline__ void wide_written() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// d (64 x n, float32) = a (64 x 16) b (16 x n), added to d where `adds`. TRANSPOSED: rows of the tile are summed over.
#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
template <int TRANSPOSED>
__device__ __forceinline__ void wide_mma64(float (*d)[4], const unsigned* a, uint64 b, int adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
      "%26,%27,%28,%29,%30,%31"
      "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38; }\n"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3),
        FOUR(4), FOUR(5), FOUR(6), FOUR(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(TRANSPOSED));
}
template <int TRANSPOSED>
__device__ __forceinline__ void wide_mma128(float (*d)[4], const unsigned* a, uint64 b, int adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
      "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"
      "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70; }\n"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3),
        FOUR(4), FOUR(5), FOUR(6), FOUR(7),
        FOUR(8), FOUR(9), FOUR(10), FOUR(11),
        FOUR(12), FOUR(13), FOUR(14), FOUR(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(TRANSPOSED));
}
// The same with both operands in shared memory, 16 to 128 outputs at once.
#define EIGHT(i) FOUR(i), FOUR(i + 1)
#define WIDE_BOTH(n, registers, a_at, b_at, adds_at, ...)                                                                   \
  __device__ __forceinline__ void wide_both##n(float (*d)[4], uint64 a, uint64 b, int adds) {                               \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" #n                      \
                 "k16.f32.bf16.bf16 {" registers "}, " a_at ", " b_at ", p, 1, 1, 0, 0; }\n"                                \
                 : __VA_ARGS__                                                                                              \
                 : "l"(a), "l"(b), "r"(adds));                                                                              \
  }
#define TO_7 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TO_15 TO_7 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TO_31 TO_15 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TO_63                                                                                                               \
  TO_31 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
        "%60,%61,%62,%63"
WIDE_BOTH(16, TO_7, "%8", "%9", "%10", EIGHT(0))
WIDE_BOTH(32, TO_15, "%16", "%17", "%18", EIGHT(0), EIGHT(2))
WIDE_BOTH(64, TO_31, "%32", "%33", "%34", EIGHT(0), EIGHT(2), EIGHT(4), EIGHT(6))
WIDE_BOTH(128, TO_63, "%64", "%65", "%66", EIGHT(0), EIGHT(2), EIGHT(4), EIGHT(6), EIGHT(8), EIGHT(10), EIGHT(12), EIGHT(14))
#undef WIDE_BOTH
#undef EIGHT
#undef FOUR

}  // namespace vs
