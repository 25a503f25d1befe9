// All layers of a pass of few rows on weights of few bits, as one kernel: for drafts, so its bits are nobody's promise.
// Compiled for a model and a number of rows: WIDTH, HEADS, KV_HEADS, HEAD_DIM (64 or 128), MLP, BITS, E4M3 and BLOCK_ROWS (of
// quantized.cuh; as many as the pass has, or more), WARPS (that multiply), ATTENDING (of them, that attend), STAGES, ENDERS.
// There is one block for each SM, all of them at once. A block has every gridDim.x-th tile of 16 weight rows of each matrix. One
// thread has the copy engine bring them, tile by tile and layer by layer, through a ring in shared memory that nobody else stops
// from filling. WARPS chunks of 64 columns are a stage, one for each warp that multiplies; ENDERS more warps, tile by tile in
// turns, add the sums of all and do what follows.
// What blocks give each other are words of two numbers and the layer they are of, so that nobody waits for anything but the
// numbers that it needs: who reads a word asks again until it is of this layer. A word is written again a layer later, when all
// have read it, because what is written then is made of what they made of it.
#include "barriers.cuh"
#include "quantized.cuh"
#include "softmax.cuh"

using namespace vs;

enum { kQkv, kOut, kGateUp, kDown, kMatrices };

// Of one layer, in memory.
struct Layer {
  const unsigned char* weights[kMatrices];
  const float* bias;      // of q/k/v, or null
  const float* gains[2];  // of the norms behind the output and the down product
  const float* cosines;   // [context, HEAD_DIM / 2]
  const float* sines;
  bf16* k_store;          // [slots, KV_HEADS, HEAD_DIM]
  bf16* v_store;
  int64 window;           // how many positions a row sees, itself included
};

struct Pass {
  const Layer* layers;
  uint64* words;          // what blocks give each other: see Words
  unsigned* num_done;     // layers of all passes before this one
  bf16* x;                // [rows, WIDTH], the residual stream
  bf16* scaled;           // [rows, WIDTH], x times the next norm's weight
  float* nodes;           // [rows, WIDTH / 16], sums of 16 squares of x
  const int* table;       // [sequence rows, table_width]
  const int* positions;   // [rows]
  const int* slots;
  const int* seq_rows;
  const int* prefix_lens;
  const int* ready_lens;  // how much of a row's context was written before this pass
  const int* tails;       // [rows, tail_width]
  int* not_finite;        // [rows], set to 1 where K or V was not finite
  const int* busy;        // 0: the pass has no row but padding, and nothing is done; or null
  int64 table_width;
  int tail_width;
  int num_layers;
  int rows;
  float eps;
  float scale;            // log2(e) / sqrt(query scalar)
};

__host__ __device__ constexpr int outputs_of(int matrix) {
  return matrix == kQkv ? (HEADS + 2 * KV_HEADS) * HEAD_DIM : matrix == kGateUp ? 2 * MLP : WIDTH;
}
__host__ __device__ constexpr int chunks_of(int matrix) {
  return (matrix == kOut ? HEADS * HEAD_DIM : matrix == kDown ? MLP : WIDTH) / 64;
}
__host__ __device__ constexpr int steps_of(int matrix) { return (chunks_of(matrix) + WARPS - 1) / WARPS; }  // of a tile
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int kThreads = 32 * (WARPS + ENDERS + 1), kHalf = HEAD_DIM / 2;
constexpr int kGroup = HEADS / KV_HEADS, kPer = HEAD_DIM / 32, kSpans = 8, kLeastSpan = 64, kAttendingTile = 16;
constexpr bool kBoth = kGroup > 8;
constexpr int kStageBytes = WARPS * kChunkBytes, kRingBytes = STAGES * kStageBytes;
constexpr int kMostSteps = larger(larger(steps_of(kQkv), steps_of(kOut)), larger(steps_of(kGateUp), steps_of(kDown)));
constexpr int kRowBytes = kMostSteps * BLOCK_ROWS * 64;  // of a warp
constexpr int kHeldSteps = 4;  // of rows that stay in registers

// Where words stand, by how many rows there may be at all; two bf16 to a word, but for sums of squares and states of spans.
struct Words {
  static constexpr int kRows = 8;
  static constexpr int64 of_qkv = 0;  // [rows, WIDTH / 2]: columns 16 t + g and 16 t + 8 + g of tile t
  static constexpr int64 of_gate_up = of_qkv + kRows * (WIDTH / 2);
  static constexpr int64 nodes_of_qkv = of_gate_up + kRows * (WIDTH / 2);  // [rows, WIDTH / 16]
  static constexpr int64 nodes_of_gate_up = nodes_of_qkv + kRows * (WIDTH / 16);
  static constexpr int64 heads = nodes_of_gate_up + kRows * (WIDTH / 16);  // [rows, heads, kHalf]: columns i and kHalf + i
  static constexpr int64 records = heads + kRows * (HEADS + 2 * KV_HEADS) * kHalf;  // [rows, HEADS, kSpans, kHalf]: neighbours
  static constexpr int64 states = records + static_cast<int64>(kRows) * HEADS * kSpans * kHalf;  // [rows, HEADS, kSpans, 2]
  static constexpr int64 of_down = states + kRows * HEADS * kSpans * 2;  // [rows, MLP / 2]: columns 8 t + g and 8 t + 4 + g
};

// What the rows' place is for while blocks attend: of each of those warps.
struct Attended {
  float o[kGroup][HEAD_DIM], state[16][2], weights[16][kAttendingTile], by[16];
};

struct Row {
  int position, slot, seq_row, prefix_len, ready_len;
};

__device__ __forceinline__ void put_word(uint64* to, unsigned value, unsigned epoch) {
  const uint64 word = static_cast<uint64>(epoch) << 32 | value;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;\n" ::"l"(to), "l"(word) : "memory");
}
struct Pair {
  uint64 word[2];
};
__device__ __forceinline__ Pair load_pair(const uint64* from) {
  Pair pair;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];\n" : "=l"(pair.word[0]), "=l"(pair.word[1]) : "l"(from) : "memory");
  return pair;
}
__device__ __forceinline__ void give_way() { asm volatile("nanosleep.u32 20;\n" ::: "memory"); }
// Seconds of asking: a fault of the device is told, and does not stop the engine for ever.
constexpr int kMostAsked = 1 << 24;
__device__ __forceinline__ void give_up() { asm volatile("trap;\n"); }
__device__ __forceinline__ bool is_of(const Pair& pair, unsigned epoch) {
  return static_cast<unsigned>(pair.word[0] >> 32) == epoch && static_cast<unsigned>(pair.word[1] >> 32) == epoch;
}
// Pairs of words of this layer, all on their way at once; null pointers are of nobody.
template <int COUNT>
__device__ __forceinline__ void take(const uint64* const (&from)[COUNT], unsigned epoch, uint2 (&values)[COUNT]) {
  Pair pairs[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) pairs[i].word[0] = pairs[i].word[1] = static_cast<uint64>(epoch) << 32;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (from[i] != nullptr) pairs[i] = load_pair(from[i]);
  for (int asked = 0;; ++asked) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all &= is_of(pairs[i], epoch);
    if (all) break;
    if (asked == kMostAsked) give_up();
    give_way();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (!is_of(pairs[i], epoch)) pairs[i] = load_pair(from[i]);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = make_uint2(static_cast<unsigned>(pairs[i].word[0]), static_cast<unsigned>(pairs[i].word[1]));
}

// Where word n of a row stands: lane j of eight reads 4 j .. 4 j + 3 of 32 as two pairs, and what all eight read at once is
// one line.
__device__ __forceinline__ int place_of_word(int n) { return (n & ~31) | (n >> 2 & 7) * 2 | (n & 1) | (n >> 1 & 1) * 16; }
constexpr int kSecondPair = 16;  // words behind the first one

__device__ __forceinline__ unsigned two_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ float low_of(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(unsigned pair) { return __uint_as_float(pair & 0xffff0000); }
// The lower, or the upper, halves of two words.
__device__ __forceinline__ unsigned halves(uint2 words, int upper) { return __byte_perm(words.x, words.y, upper ? 0x7632 : 0x5410); }

// A block's first tile of a matrix, and how many it has. Whoever has one more for the MLP has one less of the rest.
__device__ __forceinline__ int first_tile(int matrix) {
  return matrix == kGateUp ? static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x);
}
__device__ __forceinline__ int own_tiles(int matrix) {
  const int tiles = outputs_of(matrix) / 16, first = first_tile(matrix), blocks = gridDim.x;
  return first < tiles ? (tiles - first + blocks - 1) / blocks : 0;
}

struct Shared {
  Layer* layers;
  Row* rows;
  unsigned char* ring;
  uint64 *full, *empty;  // of stages
  uint64 *added, *read;  // of sums
};

// Has the copy engine fill the ring.
__device__ void bring(const Shared& s, int num_layers) {
  const uint64 once = read_once();
  Turn turn;
  int64 count = 0;
  for (int layer = 0; layer < num_layers; ++layer)
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
      const int tiles = own_tiles(matrix), chunks = chunks_of(matrix);
      const unsigned char* values = s.layers[layer].weights[matrix];
      const unsigned char* scales = values + static_cast<int64>(outputs_of(matrix) / 16) * chunks * kValueBytes;
      for (int i = 0; i < tiles; ++i) {
        const int64 tile = static_cast<int64>(first_tile(matrix) + i * static_cast<int>(gridDim.x)) * chunks;
        for (int chunk = 0; chunk < chunks; chunk += WARPS, ++count) {
          const int num = min(WARPS, chunks - chunk);
          const unsigned to = shared_address(s.ring + turn.stage * kStageBytes);
          if (count >= STAGES) wait_for(s.empty + turn.stage, turn.phase ^ 1);
          expect(s.full + turn.stage, num * kChunkBytes);
          copy_bytes_once(to, values + (tile + chunk) * kValueBytes, num * kValueBytes, s.full + turn.stage, once);
          copy_bytes_once(to + WARPS * kValueBytes, scales + (tile + chunk) * 64, num * 64, s.full + turn.stage, once);
          turn.advance();
        }
      }
    }
}

// How a row's context is cut for attention: into as many spans as there are blocks for, at most kSpans.
struct Spans {
  int begin, size, num;
  __device__ __forceinline__ Spans(const Row& row, int64 window, int rows) {
    const int len = row.position + 1, seen = static_cast<int>(min(static_cast<int64>(len), window));
    const int most = smaller(kSpans, larger(1, static_cast<int>(gridDim.x) / (rows * KV_HEADS)));
    begin = len - seen;
    size = larger(kLeastSpan, ((seen + most - 1) / most + kAttendingTile - 1) / kAttendingTile * kAttendingTile);
    num = (seen + size - 1) / size;
  }
};

// Eight neighbouring columns of a row's attention: its spans merged.
__device__ __forceinline__ void take_attended(const Pass& a, const Row& row, int64 window, int at, int column, unsigned epoch, float* v) {
  constexpr int kAtOnce = 4;
  const int spans = Spans(row, window, a.rows).num;
  const int64 first = (static_cast<int64>(at) * HEADS + column / HEAD_DIM) * kSpans;
  const uint64* records = a.words + Words::records + first * kHalf + place_of_word(column % HEAD_DIM / 2);
  const uint64* states = a.words + Words::states + first * 2;
  float m = neg_inf(), l = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = 0.0f;
  for (int begin = 0; begin < spans; begin += kAtOnce) {
    const uint64* from[3 * kAtOnce];
    uint2 values[3 * kAtOnce];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      const bool is_there = begin + s < spans;
      from[3 * s] = is_there ? states + (begin + s) * 2 : nullptr;
      from[3 * s + 1] = is_there ? records + (begin + s) * kHalf : nullptr;
      from[3 * s + 2] = is_there ? records + (begin + s) * kHalf + kSecondPair : nullptr;
    }
    take(from, epoch, values);
    float top = m;
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s)
      if (from[3 * s] != nullptr) top = fmaxf(top, __uint_as_float(values[3 * s].x));
    const float before = decay(m, top);
    l = mul(l, before);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = mul(v[i], before);
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      const float by = from[3 * s] != nullptr ? weight(__uint_as_float(values[3 * s].x), subtracted(top)) : 0.0f;
      l = fused(__uint_as_float(values[3 * s].y), by, l);
      const unsigned words[4] = {values[3 * s + 1].x, values[3 * s + 1].y, values[3 * s + 2].x, values[3 * s + 2].y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[2 * i] = fused(low_of(words[i]), by, v[2 * i]);
        v[2 * i + 1] = fused(high_of(words[i]), by, v[2 * i + 1]);
      }
    }
    m = top;
  }
  const float inverse = div(1.0f, l);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = mul(v[i], inverse);
}

// Eight columns of a row's chunk for a lane, and where they stand in it: four at place_of_four(first), four at
// place_of_four(second).
template <int MATRIX>
struct Eight {
  float v[8];
  __device__ static int first(int j) { return MATRIX == kQkv || MATRIX == kGateUp ? j / 2 * 4 + j % 2 : 2 * j; }
  __device__ static int second(int j) { return MATRIX == kQkv || MATRIX == kGateUp ? first(j) + 2 : 2 * j + 1; }
};

// The warp's columns of all rows, in 8 bits [step][row]; eight lanes have 64 columns of a row. `epoch` of what they are made of.
template <int MATRIX>
__device__ __forceinline__ void take_rows(const Pass& a, const Shared& s, const Layer& layer, bool is_first, unsigned epoch,
                                          unsigned char* rows, float* row_scales, int warp, int lane) {
  constexpr int kSteps = steps_of(MATRIX), kChunks = chunks_of(MATRIX), kTurns = (BLOCK_ROWS * kSteps * 8 + 31) / 32;
  constexpr int kAtOnce = MATRIX == kOut ? 1 : smaller(kTurns, 6);
  const uint64* words = a.words + (MATRIX == kQkv ? Words::of_qkv : MATRIX == kGateUp ? Words::of_gate_up : Words::of_down);
  const int j = lane & 7;
  for (int begin = 0; begin < kTurns; begin += kAtOnce) {
    float v[kAtOnce][8];
    const uint64* from[2 * kAtOnce];
    uint2 values[2 * kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = ((begin + i) * 32 + lane) / 8, row = at / kSteps, chunk = at % kSteps * WARPS + warp;
      const bool wanted = row < BLOCK_ROWS && row < a.rows && chunk < kChunks;
#pragma unroll
      for (int n = 0; n < 8; ++n) v[i][n] = 0.0f;
      if (MATRIX == kOut) {
        if (wanted) take_attended(a, s.rows[row], layer.window, row, chunk * 64 + j * 8, epoch, v[i]);
      } else if (MATRIX == kQkv && is_first) {
        const bf16* x = a.scaled + static_cast<int64>(row) * WIDTH + chunk * 64;
#pragma unroll
        for (int n = 0; n < 8; ++n)
          if (wanted) v[i][n] = to_float(x[4 * (n < 4 ? Eight<kQkv>::first(j) : Eight<kQkv>::second(j)) + n % 4]);
      } else {
        from[2 * i] = wanted ? words + (static_cast<int64>(row) * kChunks + chunk) * 32 + j * 2 : nullptr;
        from[2 * i + 1] = wanted ? from[2 * i] + kSecondPair : nullptr;
      }
    }
    if (MATRIX != kOut && !(MATRIX == kQkv && is_first)) {
      take(from, epoch, values);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned own[4] = {values[2 * i].x, values[2 * i].y, values[2 * i + 1].x, values[2 * i + 1].y};
#pragma unroll
        for (int n = 0; n < 4; ++n) v[i][n] = low_of(own[n]), v[i][4 + n] = high_of(own[n]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = ((begin + i) * 32 + lane) / 8, row = at / kSteps, to = at % kSteps * BLOCK_ROWS + row;
      float scale;
      const uint2 eight = in_eight_bits(v[i], scale);
      if (row < BLOCK_ROWS) {
        *reinterpret_cast<unsigned*>(rows + to * 64 + place_of_four(Eight<MATRIX>::first(j))) = eight.x;
        *reinterpret_cast<unsigned*>(rows + to * 64 + place_of_four(Eight<MATRIX>::second(j))) = eight.y;
        if (j == 0) row_scales[to] = scale;
      }
    }
  }
  __syncwarp();
}

// Who multiplies: where it is in the ring, and which places of sums were filled, ever and an odd number of times.
struct Multiplier {
  const Shared& s;
  float4 (*sums)[WARPS][32];
  unsigned char* rows;
  float* row_scales;
  int warp, lane;
  Turn turn = {};
  unsigned filled = 0, odd = 0;

  // A matrix: the warp's columns of the block's tiles.
  template <int MATRIX>
  __device__ __forceinline__ void multiply_tiles(const Pass& a, const Layer& layer, bool is_first, unsigned epoch) {
    constexpr int kSteps = steps_of(MATRIX), kChunks = chunks_of(MATRIX);
    constexpr bool kHeld = kSteps <= kHeldSteps;
    const int tiles = own_tiles(MATRIX), g = lane >> 2, t = lane & 3;
    if (tiles == 0) return;
    take_rows<MATRIX>(a, s, layer, is_first, epoch, rows, row_scales, warp, lane);
    const unsigned char* row = rows + g % BLOCK_ROWS * 64 + t * 16;
    const float* row_scale = row_scales + 2 * t % BLOCK_ROWS;
    uint4 held[kHeld ? kSteps : 1];
    float scales[kHeld ? kSteps : 1][2];
    if (kHeld) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        held[kHeld ? step : 0] = *reinterpret_cast<const uint4*>(row + step * BLOCK_ROWS * 64);
        scales[kHeld ? step : 0][0] = row_scale[step * BLOCK_ROWS], scales[kHeld ? step : 0][1] = row_scale[step * BLOCK_ROWS + kSides - 1];
      }
    }
    for (int tile = 0; tile < tiles; ++tile) {
      float acc[4] = {};
#pragma unroll kHeld ? kSteps : 1
      for (int step = 0; step < kSteps; ++step) {
        wait_for(s.full + turn.stage, turn.phase);
        __syncwarp();
        const unsigned char* stage = s.ring + turn.stage * kStageBytes;
        if (step * WARPS + warp < kChunks) {
          const unsigned char *values = stage + warp * kValueBytes, *of_weights = stage + WARPS * kValueBytes + warp * 64;
          if (kHeld) {
            multiply(acc, values, of_weights, held[kHeld ? step : 0], scales[kHeld ? step : 0][0], scales[kHeld ? step : 0][1], lane);
          } else {
            const float* own = row_scale + step * BLOCK_ROWS;
            multiply(acc, values, of_weights, *reinterpret_cast<const uint4*>(row + step * BLOCK_ROWS * 64), own[0], own[kSides - 1], lane);
          }
        }
        __syncwarp();  // all lanes have read it
        if (lane == 0) arrive(s.empty + turn.stage);
        turn.advance();
      }
      const int place = tile % ENDERS;
      if (filled >> place & 1) wait_for(s.read + place, ~odd >> place & 1);
      filled |= 1u << place, odd ^= 1u << place;
      sums[place][warp][lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
      __syncwarp();
      if (lane == 0) arrive(s.added + place);
    }
    __syncwarp();  // before the rows are overwritten
  }
};

// Named barriers of the warps that attend.
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
enum { kWithin = 1 };

// One warp's share of a span of a row's context for one K/V head.
struct Attention {
  const Pass& a;
  const Shared& s;
  Attended& mine;
  int warp, lane;
  float o[kGroup][kPer], l[2], m[2];

  // 16 positions: their scores and values, as `mma` and as columns of a lane have them. Weights of what is not seen are 0.
  template <typename Seen, typename Value>
  __device__ __forceinline__ void add_tile(float (*scores)[4], Seen seen, Value value) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i <= kBoth; ++i) {
      float top = m[i];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          scores[n][e] = seen(n * 8 + 2 * t + (e & 1)) ? mul(scores[n][e], a.scale) : neg_inf();
          top = fmaxf(top, scores[n][e]);
        }
      top = quad_max(top);
      const float by = decay(m[i], top), less = subtracted(top);
      m[i] = top, l[i] = mul(l[i], by);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          const float w = weight(scores[n][e], less);
          l[i] = add(l[i], w);
          mine.weights[g + 8 * i][n * 8 + 2 * t + (e & 1)] = w;
        }
      if (t == 0) mine.by[g + 8 * i] = by;
    }
    __syncwarp();
#pragma unroll
    for (int head = 0; head < kGroup; ++head) {
      const float by = mine.by[head];
#pragma unroll
      for (int i = 0; i < kPer; ++i) o[head][i] = mul(o[head][i], by);
#pragma unroll
      for (int j = 0; j < kAttendingTile; ++j) {
        const float w = mine.weights[head][j];
#pragma unroll
        for (int i = 0; i < kPer; ++i) o[head][i] = fused(w, value(j, i), o[head][i]);
      }
    }
    __syncwarp();  // the weights have been read
  }

  // q of the group's heads as `mma` wants it: columns 4 t .. 4 t + 3 of each 16.
  __device__ __forceinline__ void take_query(unsigned (*q)[4], int at, int kv_head, unsigned epoch) const {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i <= kBoth; ++i) {
      const int head = g + 8 * i;
      const uint64* words = a.words + Words::heads + (static_cast<int64>(at) * (HEADS + 2 * KV_HEADS) + kv_head * kGroup + head) * kHalf + 4 * t;
      const uint64* from[HEAD_DIM / 16];
      uint2 values[HEAD_DIM / 16];
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; ++n) from[n] = head < kGroup ? words + n / 2 * 16 + n % 2 * 2 : nullptr;
      take(from, epoch, values);
      __syncwarp();  // of lanes that asked, and those that did not
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; n += 2)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const int step = n / 2 + upper * (HEAD_DIM / 32);
          q[step][i] = head < kGroup ? halves(values[n], upper) : 0;
          q[step][2 + i] = head < kGroup ? halves(values[n + 1], upper) : 0;
        }
      if (!kBoth)
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) q[step][1] = q[step][3] = 0;
    }
  }

  // The rows of this pass that a row sees: their K and V are not in the store yet.
  __device__ __forceinline__ void add_new(const unsigned (*q)[4], int kv_head, unsigned visible, unsigned epoch) {
    const int g = lane >> 2, t = lane & 3;
    const auto words_of = [&](int row, int head) {
      return a.words + Words::heads + (static_cast<int64>(row) * (HEADS + 2 * KV_HEADS) + HEADS + head) * kHalf;
    };
    float scores[2][4] = {};
    {
      const uint64* from[HEAD_DIM / 16];
      uint2 values[HEAD_DIM / 16];
      const bool wanted = visible >> g & 1;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; ++n)
        from[n] = wanted ? words_of(g, kv_head) + 4 * t + n / 2 * 16 + n % 2 * 2 : nullptr;
      take(from, epoch, values);
      __syncwarp();
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; ++step) {
        const int n = step % (HEAD_DIM / 32) * 2, upper = step / (HEAD_DIM / 32);
        const unsigned k[2] = {halves(values[n], upper), halves(values[n + 1], upper)};
        mma(scores[0], q[step], k);
      }
    }
    float v[BLOCK_ROWS][kPer];
    const int column = lane * kPer, upper = column / kHalf;
#pragma unroll
    for (int j = 0; j < BLOCK_ROWS; ++j) {
      const uint64* from[kPer / 2];
      uint2 values[kPer / 2];
#pragma unroll
      for (int i = 0; i < kPer / 2; ++i) from[i] = visible >> j & 1 ? words_of(j, KV_HEADS + kv_head) + column % kHalf + 2 * i : nullptr;
      take(from, epoch, values);
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const unsigned word = i % 2 ? values[i / 2].y : values[i / 2].x;
        v[j][i] = upper ? high_of(word) : low_of(word);
      }
    }
    add_tile(scores, [&](int j) { return j < 8 && visible >> j & 1; }, [&](int j, int i) { return j < BLOCK_ROWS ? v[j % BLOCK_ROWS][i] : 0.0f; });
  }

  // Positions [begin, end) of a row, every ATTENDING-th 16 of them, and, for one of the warps, the rows of this pass.
  __device__ __forceinline__ void attend(const Layer& layer, int at, int kv_head, int begin, int end, bool is_last, unsigned epoch) {
    const int g = lane >> 2, t = lane & 3;
    const Row& row = s.rows[at];
#pragma unroll
    for (int head = 0; head < kGroup; ++head)
#pragma unroll
      for (int i = 0; i < kPer; ++i) o[head][i] = 0.0f;
    l[0] = l[1] = 0.0f, m[0] = m[1] = neg_inf();
    const auto slot_at = [&](int j) { return static_cast<int>(slot_of(a, at, row.seq_row, row.prefix_len, j)); };
    const auto new_of = [&](int j, int slot) {  // rows of this pass that are position j
      unsigned found = 0;
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; ++i)
        if (i < a.rows && j >= row.ready_len && s.rows[i].slot == slot) found |= 1u << i;
      return found;
    };
    unsigned visible = 0;
    const int seen_from = Spans(row, layer.window, a.rows).begin;
    if (is_last && warp == ATTENDING - 1) {
      for (int j = larger(row.ready_len, seen_from) + lane; j <= row.position; j += 32) visible |= new_of(j, slot_at(j));
#pragma unroll
      for (int step = 1; step < 32; step *= 2) visible |= __shfl_xor_sync(0xffffffffu, visible, step);
    }
    for (int first = begin + warp * kAttendingTile; first < end; first += ATTENDING * kAttendingTile) {  // so that they are near
      const int64 place = static_cast<int64>(slot_at(min(first + (lane & 15), end - 1))) * KV_HEADS + kv_head;
      const bf16* store = lane < 16 ? layer.k_store : layer.v_store;
#pragma unroll
      for (int line = 0; line < HEAD_DIM / 64; ++line) fetch_ahead(store + place * HEAD_DIM + line * 64);
    }
    unsigned q[HEAD_DIM / 16][4];
    take_query(q, at, kv_head, epoch);
    for (int first = begin + warp * kAttendingTile; first < end; first += ATTENDING * kAttendingTile) {
      const int j = min(first + (lane & 15), end - 1), slot = slot_at(j);
      const unsigned hidden = __ballot_sync(0xffffffffu, new_of(j, slot) != 0 || first + (lane & 15) >= end);
      const auto place = [&](int i) {
        return (static_cast<int64>(__shfl_sync(0xffffffffu, slot, i)) * KV_HEADS + kv_head) * HEAD_DIM;
      };
      unsigned v[kAttendingTile][kPer / 2];
#pragma unroll
      for (int i = 0; i < kAttendingTile; ++i) {
        const unsigned* from = reinterpret_cast<const unsigned*>(layer.v_store + place(i)) + lane * (kPer / 2);
#pragma unroll
        for (int n = 0; n < kPer / 2; ++n) v[i][n] = from[n];
      }
      float scores[2][4] = {};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const bf16* k = layer.k_store + place(n * 8 + g) + 4 * t;
        uint2 b[HEAD_DIM / 16];
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) b[step] = *reinterpret_cast<const uint2*>(k + step * 16);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) mma(scores[n], q[step], &b[step].x);
      }
      add_tile(scores, [&](int i) { return !(hidden >> i & 1); },
               [&](int i, int n) { return n % 2 ? high_of(v[i][n / 2]) : low_of(v[i][n / 2]); });
    }
    if (visible != 0) add_new(q, kv_head, visible, epoch);
#pragma unroll
    for (int i = 0; i <= kBoth; ++i) {
      l[i] = add(l[i], __shfl_xor_sync(0xffffffffu, l[i], 1));
      l[i] = add(l[i], __shfl_xor_sync(0xffffffffu, l[i], 2));
      if (t == 0) mine.state[g + 8 * i][0] = m[i], mine.state[g + 8 * i][1] = l[i];
    }
#pragma unroll
    for (int head = 0; head < kGroup; ++head)
#pragma unroll
      for (int i = 0; i < kPer; ++i) mine.o[head][lane * kPer + i] = o[head][i];
  }

  // A line of memory, near.
  __device__ static void fetch_ahead(const bf16* from) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from)); }
};

// Attention: spans of contexts by blocks, the last block first.
__device__ __forceinline__ void attend_spans(const Pass& a, const Shared& s, const Layer& layer, Attended* scratch, unsigned epoch,
                                             int warp, int lane) {
  const int units = a.rows * KV_HEADS * kSpans;
  for (int unit = gridDim.x - 1 - blockIdx.x; unit < units; unit += gridDim.x) {
    const int at = unit % a.rows, kv_head = unit / a.rows % KV_HEADS, span = unit / a.rows / KV_HEADS;
    const Spans spans(s.rows[at], layer.window, a.rows);
    if (span >= spans.num) continue;
    const int begin = spans.begin + span * spans.size, end = min(s.rows[at].position + 1, begin + spans.size);
    Attention{a, s, scratch[warp], warp, lane}.attend(layer, at, kv_head, begin, end, span == spans.num - 1, epoch);
    meet(kWithin, 32 * ATTENDING);
    const int64 first = (static_cast<int64>(at) * HEADS + kv_head * kGroup) * kSpans + span;
    for (int i = threadIdx.x; i < kGroup * kHalf; i += 32 * ATTENDING) {
      const int head = i / kHalf, column = i % kHalf * 2;
      float m = neg_inf(), l = 0.0f, low = 0.0f, high = 0.0f;
      for (int w = 0; w < ATTENDING; ++w) m = fmaxf(m, scratch[w].state[head][0]);
      for (int w = 0; w < ATTENDING; ++w) {
        const float by = weight(scratch[w].state[head][0], subtracted(m));
        l = fused(scratch[w].state[head][1], by, l);
        low = fused(scratch[w].o[head][column], by, low), high = fused(scratch[w].o[head][column + 1], by, high);
      }
      put_word(a.words + Words::records + (first + head * kSpans) * kHalf + place_of_word(i % kHalf), two_bf16(low, high), epoch);
      if (column != 0) continue;
      put_word(a.words + Words::states + (first + head * kSpans) * 2, __float_as_uint(m), epoch);
      put_word(a.words + Words::states + (first + head * kSpans) * 2 + 1, __float_as_uint(l), epoch);
    }
    __syncwarp();
    meet(kWithin, 32 * ATTENDING);  // all have read it
  }
}

// One who ends tiles.
struct Ender {
  const Pass& a;
  const Shared& s;
  const float4 (*sums)[32];          // [WARPS][32], the place of this one
  float (*x)[BLOCK_ROWS][16];        // the residual stream of its tiles
  float* factor;
  int ender, lane;
  int times = 0;

  // Sums of all warps: outputs g and g + 8 of rows 2 t and 2 t + 1.
  __device__ __forceinline__ float4 added() {
    wait_for(s.added + ender, times++ & 1);
    float4 y = sums[0][lane];
#pragma unroll
    for (int p = 1; p < WARPS; ++p) {
      const float4 other = sums[p][lane];
      y.x = add(y.x, other.x), y.z = add(y.z, other.z);
      if (kSides > 1) y.y = add(y.y, other.y), y.w = add(y.w, other.w);
    }
    __syncwarp();
    if (lane == 0) arrive(s.read + ender);
    return y;
  }

  // The factors of the norm in front: of several rows at once, which are on their way together.
  __device__ __forceinline__ void take_factors(const uint64* words, bool is_first, unsigned epoch) {
    constexpr int kPairs = WIDTH / 32, kTurns = (kPairs + 31) / 32, kAtOnce = smaller(BLOCK_ROWS, larger(1, 8 / kTurns));
    for (int first = 0; first < a.rows; first += kAtOnce) {
      float ss[kAtOnce] = {};
      if (is_first) {
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r)
          for (int i = lane; first + r < a.rows && i < WIDTH / 16; i += 32)
            ss[r] = add(ss[r], a.nodes[static_cast<int64>(first + r) * (WIDTH / 16) + i]);
      } else {
        const uint64* from[kAtOnce * kTurns];
        uint2 values[kAtOnce * kTurns];
#pragma unroll
        for (int i = 0; i < kAtOnce * kTurns; ++i) {
          const int row = first + i / kTurns, pair = i % kTurns * 32 + lane;
          from[i] = row < a.rows && pair < kPairs ? words + static_cast<int64>(row) * (WIDTH / 16) + pair * 2 : nullptr;
        }
        take(from, epoch, values);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kAtOnce * kTurns; ++i)
          if (from[i] != nullptr) ss[i / kTurns] = add(ss[i / kTurns], add(__uint_as_float(values[i].x), __uint_as_float(values[i].y)));
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const float sum = warp_tree(ss[r]);
        if (lane == 0 && first + r < a.rows) factor[first + r] = norm_factor(sum, 1.0f / WIDTH, a.eps);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void end_qkv(const Layer& layer, bool is_first, unsigned epoch) {
    const int tiles = own_tiles(kQkv), g = lane >> 2, t = lane & 3;
    bool has_factors = false;
    for (int i = ender; i < tiles; i += ENDERS) {
      const int tile = first_tile(kQkv) + i * static_cast<int>(gridDim.x);
      const int head = tile / (HEAD_DIM / 16), pair = tile % (HEAD_DIM / 16) * 8 + g;
      const bool is_rotated = head < HEADS + KV_HEADS;
      float bias[2] = {}, c[2] = {}, si[2] = {};
      if (layer.bias != nullptr) bias[0] = layer.bias[head * HEAD_DIM + pair], bias[1] = layer.bias[head * HEAD_DIM + pair + kHalf];
#pragma unroll
      for (int e = 0; e < kSides; ++e)
        if (is_rotated && 2 * t + e < a.rows) {
          const int64 at = static_cast<int64>(s.rows[2 * t + e].position) * kHalf + pair;
          c[e] = __ldg(layer.cosines + at), si[e] = __ldg(layer.sines + at);
        }
      if (!has_factors) take_factors(a.words + Words::nodes_of_qkv, is_first, epoch - 1), has_factors = true;
      const float4 y = added();
#pragma unroll
      for (int e = 0; e < kSides; ++e) {
        const int row = 2 * t + e;
        if (row >= BLOCK_ROWS || row >= a.rows) continue;
        float v0 = add(mul(rounded(e ? y.y : y.x), factor[row]), bias[0]), v1 = add(mul(rounded(e ? y.w : y.z), factor[row]), bias[1]);
        if (is_rotated) {
          const float first = v0;
          v0 = fused(-v1, si[e], mul(first, c[e]));
          v1 = fused(first, si[e], mul(v1, c[e]));
        }
        v0 = rounded(v0), v1 = rounded(v1);
        if (head >= HEADS) {
          if (!(fabsf(v0) <= 3.4e38f) || !(fabsf(v1) <= 3.4e38f)) {  // 0 x Inf would reach other rows of the sequence
            a.not_finite[row] = 1;
            v0 = v1 = 0.0f;
          }
          bf16* to = (is_rotated ? layer.k_store : layer.v_store) +
                     (static_cast<int64>(s.rows[row].slot) * KV_HEADS + (head - HEADS) % KV_HEADS) * HEAD_DIM + pair;
          to[0] = to_bf16(v0);
          to[kHalf] = to_bf16(v1);
        }
        put_word(a.words + Words::heads + (static_cast<int64>(row) * (HEADS + 2 * KV_HEADS) + head) * kHalf + pair, two_bf16(v0, v1), epoch);
      }
    }
  }

  __device__ __forceinline__ void end_gate_up(unsigned epoch) {
    const int tiles = own_tiles(kGateUp), g = lane >> 2, t = lane & 3;
    if (ender < tiles) take_factors(a.words + Words::nodes_of_gate_up, false, epoch);
    for (int i = ender; i < tiles; i += ENDERS) {
      const int tile = first_tile(kGateUp) + i * static_cast<int>(gridDim.x);
      const float4 y = added();
#pragma unroll
      for (int e = 0; e < kSides; ++e) {
        const int row = 2 * t + e;
        const float f = row < BLOCK_ROWS ? factor[row % BLOCK_ROWS] : 0.0f;
        const float h = mul(activated(mul(rounded(e ? y.y : y.x), f)), mul(rounded(e ? y.w : y.z), f));
        const float other = __shfl_xor_sync(0xffffffffu, h, 16);  // of g + 4
        if (row < BLOCK_ROWS && row < a.rows && g < 4)
          put_word(a.words + Words::of_down + static_cast<int64>(row) * (MLP / 2) + place_of_word(tile * 4 + g), two_bf16(h, other), epoch);
      }
    }
  }

  // The residual stream and what the norm behind it needs: for the other blocks, or for what follows the last layer.
  template <int MATRIX>
  __device__ __forceinline__ void end_residual(const Layer& layer, bool is_last, unsigned epoch) {
    const int tiles = own_tiles(MATRIX), g = lane >> 2, t = lane & 3;
    uint64* words = a.words + (MATRIX == kOut ? Words::of_gate_up : Words::of_qkv);
    uint64* node_words = a.words + (MATRIX == kOut ? Words::nodes_of_gate_up : Words::nodes_of_qkv);
    const float* gain = layer.gains[MATRIX == kDown];
    for (int i = ender; i < tiles; i += ENDERS) {
      const int tile = first_tile(MATRIX) + i * static_cast<int>(gridDim.x);
      const float low_gain = gain[tile * 16 + g], high_gain = gain[tile * 16 + g + 8];
      const float4 y = added();
#pragma unroll
      for (int e = 0; e < kSides; ++e) {
        const int row = 2 * t + e;
        const bool valid = row < BLOCK_ROWS && row < a.rows;
        float* before = x[i][row % BLOCK_ROWS];
        const float v0 = rounded(add(before[g], rounded(e ? y.y : y.x))), v1 = rounded(add(before[g + 8], rounded(e ? y.w : y.z)));
        float node = add(mul(v0, v0), mul(v1, v1));
        __syncwarp();
#pragma unroll
        for (int step = 4; step < 32; step *= 2) node = add(node, __shfl_xor_sync(0xffffffffu, node, step));
        if (!valid) continue;
        before[g] = v0, before[g + 8] = v1;
        const float low = mul(v0, low_gain), high = mul(v1, high_gain);
        if (!is_last) {
          put_word(words + static_cast<int64>(row) * (WIDTH / 2) + place_of_word(tile * 8 + g), two_bf16(low, high), epoch);
          if (g == 0) put_word(node_words + static_cast<int64>(row) * (WIDTH / 16) + tile, __float_as_uint(node), epoch);
          continue;
        }
        const int64 at = static_cast<int64>(row) * WIDTH + tile * 16 + g;
        a.x[at] = to_bf16(v0), a.x[at + 8] = to_bf16(v1);
        a.scaled[at] = to_bf16(low), a.scaled[at + 8] = to_bf16(high);
        if (g == 0) a.nodes[static_cast<int64>(row) * (WIDTH / 16) + tile] = node;
      }
    }
  }
};

// grid (blocks), all of them at once
extern "C" __global__ void __launch_bounds__(kThreads, 1) streamed(const __grid_constant__ Pass a) {
  extern __shared__ __align__(128) unsigned char memory[];  // the ring, layers, rows, what attends, the residual stream
  __shared__ float4 sums[ENDERS][WARPS][32];
  __shared__ float factors[ENDERS][BLOCK_ROWS];
  __shared__ Row rows[BLOCK_ROWS];
  __shared__ uint64 full[STAGES], empty[STAGES], added[ENDERS], read[ENDERS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Layer* layers = reinterpret_cast<Layer*>(memory + kRingBytes);
  unsigned char* of_rows = reinterpret_cast<unsigned char*>(layers + a.num_layers);
  float* row_scales = reinterpret_cast<float*>(of_rows + WARPS * kRowBytes);
  Attended* scratch = reinterpret_cast<Attended*>(row_scales + WARPS * kMostSteps * BLOCK_ROWS);
  float(*x)[BLOCK_ROWS][16] = reinterpret_cast<float(*)[BLOCK_ROWS][16]>(scratch + ATTENDING);
  wait_for_previous();
  if (is_idle(a.busy)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) start_barrier(full + i, 1), start_barrier(empty + i, WARPS);
    for (int i = 0; i < ENDERS; ++i) start_barrier(added + i, WARPS), start_barrier(read + i, 1);
    barriers_started();
  }
  constexpr int kWords = sizeof(Layer) / 8;
  for (int i = threadIdx.x; i < a.num_layers * kWords; i += kThreads)
    reinterpret_cast<int64*>(layers)[i] = reinterpret_cast<const int64*>(a.layers)[i];
  for (int i = threadIdx.x; i < a.rows; i += kThreads)
    rows[i] = Row{a.positions[i], a.slots[i], a.seq_rows[i], a.prefix_lens[i], a.ready_lens[i]};
  for (int i = threadIdx.x; i < own_tiles(kDown) * BLOCK_ROWS * 16; i += kThreads) {
    const int row = i / 16 % BLOCK_ROWS, tile = first_tile(kDown) + i / 16 / BLOCK_ROWS * static_cast<int>(gridDim.x);
    if (row < a.rows) x[i / 16 / BLOCK_ROWS][row][i % 16] = to_float(a.x[static_cast<int64>(row) * WIDTH + tile * 16 + i % 16]);
  }
  const unsigned before = *a.num_done;
  __syncthreads();
  const Shared shared = {layers, rows, memory, full, empty, added, read};
  if (warp == WARPS + ENDERS) {
    if (lane == 0) {
      bring(shared, a.num_layers);
      release_next();  // whose blocks come when these go
    }
    return;
  }
  if (warp < WARPS) {
    Multiplier own = {shared, sums, of_rows + warp * kRowBytes, row_scales + warp * kMostSteps * BLOCK_ROWS, warp, lane};
    for (int i = 0; i < a.num_layers; ++i) {
      const unsigned epoch = before + i + 1;
      own.multiply_tiles<kQkv>(a, layers[i], i == 0, epoch - 1);
      if (warp < ATTENDING) attend_spans(a, shared, layers[i], scratch, epoch, warp, lane);
      own.multiply_tiles<kOut>(a, layers[i], false, epoch);
      own.multiply_tiles<kGateUp>(a, layers[i], false, epoch);
      own.multiply_tiles<kDown>(a, layers[i], false, epoch);
    }
    return;
  }
  const int ender = warp - WARPS;
  Ender own = {a, shared, sums[ender], x, factors[ender], ender, lane};
  for (int i = 0; i < a.num_layers; ++i) {
    const unsigned epoch = before + i + 1;
    own.end_qkv(layers[i], i == 0, epoch);
    own.end_residual<kOut>(layers[i], false, epoch);
    own.end_gate_up(epoch);
    own.end_residual<kDown>(layers[i], i == a.num_layers - 1, epoch);
  }
  // Whoever has something to give had begun by then: the last layer is made of it.
  if (blockIdx.x == 0 && ender == 0 && lane == 0) *a.num_done = before + a.num_layers;
}
