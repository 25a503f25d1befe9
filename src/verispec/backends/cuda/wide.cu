// One linear layer of 9 to 64 rows with what follows it, on 64-row steps of the tensor core: the chains, the tree over the
// parts of K and the operations of linear.cu, so its bits. The rows are the first operand and TILES x 16 outputs the second,
// so a block has as many outputs as it takes to give every SM one block. Compiled for one layer: KIND, N, K, PARTS, HALVES (of
// 32 rows), TILES, STEP (columns of 64 a stage), STAGES, WIDTH, and for q/k/v HEADS, KV_HEADS, HEAD_DIM.
// One warp has the copy engine stream weights and rows through a ring in shared memory, which is filled with weights before the
// wait for the kernel in front; four warps multiply what has arrived and say when it may be overwritten. The blocks of a cluster
// have the parts of K; each finishes its share of the tiles. Without parts a block goes on to further tiles. Of 32 rows, row r is
// the step's row 16 (r / 8) + r % 8: every warp has rows to finish.
#include "copies.cuh"
#include "epilogues.cuh"

using namespace vs;

constexpr int kWarps = 4, kMultiplying = 32 * kWarps, kThreads = kMultiplying + 32;
constexpr int kRows = 32 * HALVES, kPart = K / PARTS, kSteps = kPart / (64 * STEP);
constexpr int kGroups = (N / 16 + TILES - 1) / TILES;
constexpr int kWeightBytes = TILES * 16 * kWideColumn, kRowBytes = kRows * kWideColumn;  // of 64 columns
constexpr int kStageBytes = STEP * (kWeightBytes + kRowBytes);
// Of 32 rows only every other eight of the step's 64 are there: what it takes for the others lies anywhere between.
constexpr int kEight = HALVES * 4 * kWideColumn;
constexpr int kOwnTiles = (TILES + PARTS - 1) / PARTS;
static_assert(kPart % (64 * STEP) == 0, "whole stages only");

struct WideArgs {
  Map weights;  // [N, K] in boxes of TILES x 16 rows and 64 columns
  Map rows;     // [rows, K] in boxes of kRows; zeros behind the last row
  Args layer;
};

__device__ __forceinline__ void meet_multiplying() { asm volatile("bar.sync 1, %0;\n" ::"n"(kMultiplying) : "memory"); }

// The tile's chains continued by 16 columns, 16 COUNT outputs of them from operand `b` on.
template <int COUNT>
__device__ __forceinline__ void step16(float (*acc)[4], uint64 rows, uint64 b, int adds) {
  constexpr int kNow = COUNT >= 8 ? 8 : COUNT >= 4 ? 4 : COUNT >= 2 ? 2 : 1;
  if constexpr (kNow == 8) wide_both128(acc, rows, b, adds);
  if constexpr (kNow == 4) wide_both64(acc, rows, b, adds);
  if constexpr (kNow == 2) wide_both32(acc, rows, b, adds);
  if constexpr (kNow == 1) wide_both16(acc, rows, b, adds);
  if constexpr (COUNT > kNow) step16<COUNT - kNow>(acc + 2 * kNow, rows, wide_further(b, kNow * 16 * kWideColumn), adds);
}

__device__ __forceinline__ float2 load_shared(unsigned address, int rank) {
  float2 v;
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %2, %3; ld.shared::cluster.v2.f32 {%0,%1}, [there]; }\n"
               : "=f"(v.x), "=f"(v.y)
               : "r"(address), "r"(rank)
               : "memory");
  return v;
}

__device__ __forceinline__ void store2(bf16* to, float low, float high) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(low, high);
}

// What a thread of the epilogue has beside the sums of a tile: of outputs 2 t + e and 8 + 2 t + e.
struct Pair {
  Columns columns[2];
  Beside beside[HALVES][2];
};

// y: outputs 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t of a tile and a row. All lanes of the warp take part.
__device__ __forceinline__ void finish_four(const Args& a, const Pair& pair, int half, int tile, int t, int row, float s, float* y) {
  const bool valid = row < a.rows;
  if (KIND != HEAD)
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = rounded(y[i]);
  if (KIND == RESIDUAL) {
    const int64 at = static_cast<int64>(row) * N + tile * 16 + 2 * t;
    float v[4], gain[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = rounded(add(pair.beside[half][i & 1].x[i >> 1], y[i]));
      gain[i] = pair.columns[i & 1].gain[i >> 1];
    }
    if (valid) {
      bf16* x = static_cast<bf16*>(a.out) + at;
      store2(x, v[0], v[1]), store2(x + 8, v[2], v[3]);
      store2(a.scaled + at, mul(v[0], gain[0]), mul(v[1], gain[1]));
      store2(a.scaled + at + 8, mul(v[2], gain[2]), mul(v[3], gain[3]));
    }
    float low = add(mul(v[0], v[0]), mul(v[1], v[1])), high = add(mul(v[2], v[2]), mul(v[3], v[3]));
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      low = add(low, __shfl_xor_sync(0xffffffffu, low, step));
      high = add(high, __shfl_xor_sync(0xffffffffu, high, step));
    }
    if (valid && t == 0) a.nodes_out[static_cast<int64>(row) * (N / 16) + tile] = add(low, high);
  }
  if (!valid) return;
  if (KIND == QKV)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      finish_qkv(a, pair.columns[e], pair.beside[half][e], tile, 2 * t + e, row, s, y[e], y[e + 2]);
  if (KIND == GATE_UP) {
    bf16* h = static_cast<bf16*>(a.out) + static_cast<int64>(row) * (N / 2) + tile * 8 + 2 * t;
    store2(h, mul(activated(mul(y[0], s)), mul(y[2], s)), mul(activated(mul(y[1], s)), mul(y[3], s)));
  }
  const int64 at = static_cast<int64>(row) * N + tile * 16 + 2 * t;
  if (KIND == HEAD) {
    float* logits = static_cast<float*>(a.out) + at;
    *reinterpret_cast<float2*>(logits) = make_float2(mul(y[0], s), mul(y[1], s));
    *reinterpret_cast<float2*>(logits + 8) = make_float2(mul(y[2], s), mul(y[3], s));
  }
  if (KIND == PLAIN) {
    bf16* out = static_cast<bf16*>(a.out) + at;
    store2(out, y[0], y[1]), store2(out + 8, y[2], y[3]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) wide(const __grid_constant__ WideArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ float factor[kRows];
  __shared__ __align__(8) uint64 full[STAGES], empty[STAGES];  // a stage has arrived; all warps are done with it
  const Args& a = args.layer;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int part = blockIdx.x % PARTS, first_group = blockIdx.x / PARTS, stride = gridDim.x / PARTS;
  const unsigned ring = shared_address(memory);

  release_next();
  if (is_idle(a.busy)) {
    wait_for_previous();
    return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) start_barrier(full + i, 1), start_barrier(empty + i, kWarps);
    barriers_started();
  }
  __syncthreads();

  if (warp == kWarps) {
    if (lane > 0) return;
    const uint64 once = read_once();
    const int count = first_group < kGroups ? (kGroups - first_group + stride - 1) / stride * kSteps : 0;  // stages in all
    const auto copy_weights = [&](int i) {
      const int stage = i % STAGES, group = first_group + i / kSteps * stride, column = part * kPart + i % kSteps * 64 * STEP;
      expect(full + stage, kStageBytes);
#pragma unroll
      for (int s = 0; s < STEP; ++s)
        copy_box_once(ring + stage * kStageBytes + STEP * kRowBytes + s * kWeightBytes, args.weights, column + s * 64,
                      group * TILES * 16, full + stage, once);
    };
    const auto copy_rows = [&](int i) {
      const int stage = i % STAGES, column = part * kPart + i % kSteps * 64 * STEP;
#pragma unroll
      for (int s = 0; s < STEP; ++s)
        copy_box(ring + stage * kStageBytes + s * kRowBytes, args.rows, column + s * 64, 0, full + stage);
    };
    for (int i = 0; i < min(STAGES, count); ++i) copy_weights(i);
    wait_for_previous();
    for (int i = 0; i < min(STAGES, count); ++i) copy_rows(i);
    for (int i = STAGES; i < count; ++i) {
      wait_for(empty + i % STAGES, i / STAGES % 2 ^ 1);
      copy_weights(i);
      copy_rows(i);
    }
    return;
  }

  const auto own_tile = [&](int group, int i) { return group * TILES + (PARTS == 1 ? i : i * PARTS + part); };
  const auto row_at = [&](int h) { return (warp * HALVES + h) * 8 + g; };
  constexpr bool kBeside = KIND == QKV || KIND == RESIDUAL;  // such a block has one group
  Pair pairs[kBeside ? kOwnTiles : 1];
  if (kBeside)
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int tile = min(own_tile(first_group, i), N / 16 - 1);
        fetch_columns(a, pairs[i].columns[e], tile, 2 * t + e);
#pragma unroll
        for (int h = 0; h < HALVES; ++h) fetch_constants(a, pairs[i].beside[h][e], row_at(h), tile, 2 * t + e);
      }
  wait_for_previous();
  if (KIND == RESIDUAL)
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
          fetch_residual(a, pairs[i].beside[h][e], row_at(h), min(own_tile(first_group, i), N / 16 - 1), 2 * t + e);
  if (kScaled)
#pragma unroll
    for (int h = 0; h < HALVES; ++h) norm_factors<8>(a, row_at(h) - g, factor + row_at(h) - g, lane);

  float acc[2 * TILES][4];
  Turn turn;
  for (int group = first_group; group < kGroups; group += stride) {
    for (int step = 0; step < kSteps; ++step) {
      wait_for(full + turn.stage, turn.phase);
      wide_fence();
      const unsigned at = ring + turn.stage * kStageBytes;
      const uint64 rows = wide_operand(at, 16, kEight), w = wide_operand(at + STEP * kRowBytes, 16);
#pragma unroll
      for (int k = 0; k < 4 * STEP; ++k)
        step16<TILES>(acc, wide_further(rows, k / 4 * kRowBytes + k % 4 * 32), wide_further(w, k / 4 * kWeightBytes + k % 4 * 32),
                      k > 0 || step > 0);
      wide_commit();
      if (step > 0) {
        wide_done<1>();
        if (lane == 0) arrive(empty + (turn.stage == 0 ? STAGES : turn.stage) - 1);
      }
      turn.advance();
    }
    wide_done<0>();
    if (lane == 0) arrive(empty + (turn.stage == 0 ? STAGES : turn.stage) - 1);

    const unsigned sums = ring + threadIdx.x * 8;  // float2 [HALVES][2 TILES][threads], where the ring was
    if (PARTS > 1) {
      meet_multiplying();
#pragma unroll
      for (int j = 0; j < 2 * TILES; ++j)
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
          *reinterpret_cast<float2*>(memory + ((h * 2 * TILES + j) * kMultiplying + threadIdx.x) * 8) =
              make_float2(acc[j][2 * h], acc[j][2 * h + 1]);
      meet_cluster();
    } else if (kScaled && group == first_group) {
      __syncwarp();  // the factors are there
    }
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i) {
      const int tile = own_tile(group, i);
      if (tile - group * TILES >= TILES || tile * 16 >= N) break;
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        float y[4];
        if (PARTS == 1) {
          y[0] = acc[2 * i][2 * h], y[1] = acc[2 * i][2 * h + 1], y[2] = acc[2 * i + 1][2 * h], y[3] = acc[2 * i + 1][2 * h + 1];
        } else {
          float2 of[2][PARTS];
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
              of[j][p] = load_shared(sums + (h * 2 * TILES + 2 * (tile - group * TILES) + j) * kMultiplying * 8, p);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float even[PARTS], odd[PARTS];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) even[p] = of[j][p].x, odd[p] = of[j][p].y;
            y[2 * j] = tree_of_parts<PARTS>(even), y[2 * j + 1] = tree_of_parts<PARTS>(odd);
          }
        }
        finish_four(a, pairs[kBeside ? i : 0], h, tile, t, row_at(h), kScaled ? factor[row_at(h)] : 1.0f, y);
      }
    }
    if (PARTS > 1) meet_cluster();  // nobody's sums are gone while others read them
  }
}
