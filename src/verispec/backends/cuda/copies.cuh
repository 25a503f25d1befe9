// Boxes of matrices that the copy engine brings into a ring in shared memory. Compiled for STAGES of the ring.
#pragma once
#include "barriers.cuh"
#include "wide.cuh"

namespace vs {

// Where the copy engine finds a matrix: as the driver encodes it.
struct alignas(64) Map {
  uint64 words[16];
};
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

}  // namespace vs
