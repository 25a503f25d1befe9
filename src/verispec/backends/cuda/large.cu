// One linear layer of many rows with what follows it, on 64-row steps of the tensor core: the chains, the tree over the parts of K
// and the operations of linear.cu, so its bits. Compiled for one layer: KIND, N, K, PARTS, BLOCKS (of 64 outputs, in a tile), GROUP
// (pairs of row tiles whose tiles follow each other), STAGES, WIDTH, and for q/k/v HEADS, KV_HEADS, HEAD_DIM.
// Two blocks of a cluster have 128 rows each and the same outputs: each brings its own rows and half of the weights, for both. One
// warp has the copy engine fill a ring; eight multiply, 64 rows for each four, and finish their rows. A block goes on to further
// tiles. Of 64 weights, row 16 t + 2 j + e stands at 8 j + 2 t + e: so a thread has 16 neighbouring outputs of its rows.
#include "copies.cuh"
#include "epilogues.cuh"
#include "tiles.cuh"

using namespace vs;

constexpr int kProducing = 128, kMultiplying = 256, kThreads = kProducing + kMultiplying;
constexpr int kRowTile = 128, kPartSteps = K / PARTS / 64, kSteps = PARTS * kPartSteps;
constexpr int kRowBytes = kRowTile * kWideColumn, kBlockBytes = 64 * kWideColumn;  // of 64 columns
constexpr int kStageBytes = kRowBytes + BLOCKS * kBlockBytes;
constexpr int kTiles = (N / 64 + BLOCKS - 1) / BLOCKS;
constexpr int kSums = PARTS == 4 ? 3 : PARTS > 1 ? 2 : 1;  // that are held at once
static_assert(K % (64 * PARTS) == 0 && N % 64 == 0, "whole stages and blocks only");

struct LargeArgs {
  Map weights;  // [N, K] as {e, t, j, block} of rows, in boxes of 32 of them
  Map rows;     // [rows, K] in boxes of 128; zeros behind the last row
  Args layer;
  const float* factors;  // [rows] of the norm
};

// 32 rows of a block of weights, for both blocks of the cluster, at the same place and barrier of each.
__device__ __forceinline__ void copy_to_both(unsigned to, const Map& map, int column, int eight, int block, uint64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %3, %4, "
      "%5}], [%6], %7;\n" ::"r"(to),
      "l"(&map), "r"(column), "r"(0), "r"(eight), "r"(block), "r"(shared_address(barrier)), "h"(static_cast<unsigned short>(3))
      : "memory");
}
__device__ __forceinline__ void arrive_at(uint64* barrier, int rank) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }\n" ::"r"(
                   shared_address(barrier)),
               "r"(rank)
               : "memory");
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}

__device__ __forceinline__ void step16(float (*acc)[4], uint64 rows, uint64 b, int adds) {
  if constexpr (BLOCKS == 2) wide_both128(acc, rows, b, adds);
  if constexpr (BLOCKS == 1) wide_both64(acc, rows, b, adds);
}

__device__ __forceinline__ void add_all(float (*to)[4], float (*from)[4]) {
#pragma unroll
  for (int i = 0; i < 32 * BLOCKS; ++i) to[i / 4][i % 4] = add(to[i / 4][i % 4], from[i / 4][i % 4]);
}

// Where a tile is: which pair of row tiles, and which outputs.
struct Place {
  int pair, column;
  __device__ __forceinline__ Place(int i, int pairs) {
    const int first = i / (GROUP * kTiles) * GROUP, size = min(GROUP, pairs - first), rest = i - first * kTiles;
    pair = first + rest % size, column = rest / size;
  }
};

struct alignas(16) Eights {
  uint4 low, high;
};
// Keeps the compiler from fetching for all tiles at once, for which there are no registers.
__device__ __forceinline__ void one_after_the_other() { asm volatile("" ::: "memory"); }

// y: 16 neighbouring outputs of a row, sums over the parts of K.
__device__ __forceinline__ void finish_tile(const Args& a, int row, int tile, float s, const Eights& before, float* y) {
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = rounded(y[i]);
#if KIND == QKV
  const int head = tile / (HEAD_DIM / 16), first = tile % (HEAD_DIM / 16) * 8;
  const int64 place = static_cast<int64>(a.positions[row]) * (HEAD_DIM / 2) + first;
  float c[8], si[8];
  load_eight(a.cosines + place, c);
  load_eight(a.sines + place, si);
  scale_pairs(a, head, first, s, y, y + 8);
  store_pairs(a, row, a.slots[row], head, first, c, si, y, y + 8);
#elif KIND == RESIDUAL
  float x[16];
  unpack(before.low, x), unpack(before.high, x + 8);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = rounded(add(x[i], y[i]));
  const float low = store_stream(a, row, tile * 16, true, x), high = store_stream(a, row, tile * 16 + 8, true, x + 8);
  a.nodes_out[static_cast<int64>(row) * (N / 16) + tile] = add(low, high);
#elif KIND == GATE_UP
  activate(y, y + 8, s);
  *reinterpret_cast<uint4*>(static_cast<bf16*>(a.out) + static_cast<int64>(row) * (N / 2) + tile * 8) = pack(y);
#else
  uint4* out = reinterpret_cast<uint4*>(static_cast<bf16*>(a.out) + static_cast<int64>(row) * N + tile * 16);
  out[0] = pack(y), out[1] = pack(y + 8);
#endif
}

// The multiplying warps' work on one tile.
__device__ __forceinline__ void multiply(const LargeArgs& args, unsigned ring, uint64* full, uint64* empty, Turn& turn, int first_row,
                                         int first_block) {
  const Args& a = args.layer;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  float acc[kSums][8 * BLOCKS][4];  // p0, then p0 + p1; p1, then p2; p3
  const auto release_last = [&] {
    if (lane < 2) arrive_at(empty + (turn.stage == 0 ? STAGES : turn.stage) - 1, lane);
  };
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    for (int step = 0; step < kPartSteps; ++step) {
      wait_for(full + turn.stage, turn.phase);
      wide_fence();
      const unsigned at = ring + turn.stage * kStageBytes;
      const uint64 rows = wide_operand(at + group * 64 * kWideColumn, 16), w = wide_operand(at + kRowBytes, 16);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        step16(acc[part < 2 ? part : part - 1], wide_further(rows, k * 32), wide_further(w, k * 32), k > 0 || step > 0);
      wide_commit();
      if (part > 0 || step > 0) {
        wide_done<1>();
        release_last();
      }
      turn.advance();
    }
    if (PARTS > 2 && part == 1) {
      wide_done<0>();
      add_all(acc[0], acc[1]);
    }
  }
  wide_done<0>();
  release_last();
  if (PARTS == 4) add_all(acc[kSums - 2], acc[kSums - 1]);
  if (PARTS > 1) add_all(acc[0], acc[1]);

  const int row = first_row + group * 64 + warp * 16 + g;
  float s[2] = {1.0f, 1.0f};
  if (kScaled)
#pragma unroll
    for (int h = 0; h < 2; ++h) s[h] = __ldg(args.factors + min(row + 8 * h, a.rows - 1));
  const auto is_there = [&](int i) { return row + i % 2 * 8 < a.rows && (first_block + i / 2) * 64 < N; };
  Eights before[2];
  const auto fetch = [&](int i) {
    if (KIND == RESIDUAL && is_there(i))
      before[i % 2] = *reinterpret_cast<const Eights*>(static_cast<const bf16*>(a.out) + static_cast<int64>(row + i % 2 * 8) * N +
                                                       (first_block + i / 2) * 64 + t * 16);
  };
  fetch(0);
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; ++i) {
    if (i + 1 < 2 * BLOCKS) fetch(i + 1);
    float y[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) y[k] = acc[0][i / 2 * 8 + k / 2][i % 2 * 2 + k % 2];
    if (is_there(i)) finish_tile(a, row + i % 2 * 8, (first_block + i / 2) * 4 + t, s[i % 2], before[i % 2], y);
    one_after_the_other();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) large(const __grid_constant__ LargeArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) uint64 full[STAGES], empty[STAGES];  // a stage has arrived; all warps of both blocks are done with it
  const int rank = blockIdx.x % 2, pairs = (args.layer.rows + 2 * kRowTile - 1) / (2 * kRowTile);
  const int stride = gridDim.x / 2, all = kTiles * pairs;
  const unsigned ring = shared_address(memory);

  release_next();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) start_barrier(full + i, 1), start_barrier(empty + i, 2 * kMultiplying / 32);
    barriers_started();
  }
  meet_cluster();
  wait_for_previous();

  if (threadIdx.x < kProducing) {
    give_registers<24>();
    if (threadIdx.x == 0) {
      Turn turn;
      bool again = false;  // the ring has been filled once
      for (int i = blockIdx.x / 2; i < all; i += stride) {
        const Place place(i, pairs);
        for (int step = 0; step < kSteps; ++step) {
          if (again) wait_for(empty + turn.stage, turn.phase ^ 1);
          const unsigned to = ring + turn.stage * kStageBytes;
          expect(full + turn.stage, kStageBytes);
          copy_box(to, args.rows, step * 64, (2 * place.pair + rank) * kRowTile, full + turn.stage);
          for (int b = 0; b < BLOCKS; ++b)
            copy_to_both(to + kRowBytes + b * kBlockBytes + rank * kBlockBytes / 2, args.weights, step * 64, 4 * rank,
                         place.column * BLOCKS + b, full + turn.stage);
          turn.advance();
          again |= turn.stage == 0;
        }
      }
    }
    __syncwarp();
  } else {
    take_registers<240>();
    Turn turn;
    for (int i = blockIdx.x / 2; i < all; i += stride) {
      const Place place(i, pairs);
      multiply(args, ring, full, empty, turn, (2 * place.pair + rank) * kRowTile, place.column * BLOCKS);
    }
  }
  meet_cluster();  // the other block may still write here, and arrive
}
