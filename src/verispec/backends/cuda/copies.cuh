// Boxes of matrices that the copy engine brings into a ring in shared memory, and the barriers that say what has arrived and what
// may be overwritten. Compiled for STAGES of the ring.
#pragma once
#include "wide.cuh"

namespace vs {

// Where the copy engine finds a matrix: as the driver encodes it.
struct alignas(64) Map {
  uint64 words[16];
};
__device__ __forceinline__ void start_barrier(uint64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_started() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
__device__ __forceinline__ void arrive(uint64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
// So many bytes are on their way, or will be.
__device__ __forceinline__ void expect(uint64* barrier, int nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(nbytes) : "memory");
}
__device__ __forceinline__ bool has_passed(uint64* barrier, int phase) {
  int passed;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }\n"
               : "=r"(passed)
               : "r"(shared_address(barrier)), "r"(phase)
               : "memory");
  return passed;
}
__device__ __forceinline__ void wait_for(uint64* barrier, int phase) {
  while (!has_passed(barrier, phase)) {
  }
}
// A box of a matrix from `row` and `column` on, swizzled by `wide_offset`; its bytes arrive at the barrier.
__device__ __forceinline__ void copy_box(unsigned to, const Map& map, int column, int row, uint64* barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n" ::"r"(to),
               "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void copy_box_once(unsigned to, const Map& map, int column, int row, uint64* barrier, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;\n" ::"r"(
          to),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// Goes round the ring: which stage is next, and how often it has been round.
struct Turn {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

}  // namespace vs
