// Attention over slot tables: decode, prompt and tree rows by one definition (docs/cuda-arithmetic.md, "Attention").
// Compiled for one model: HEADS, KV_HEADS, HEAD_DIM; TWO_BUFFERS: whether K and V of a span have shared memory each (few
// rows: both are fetched before the wait) or V comes where K was (many rows: more blocks fit); CLUSTER: whether the blocks of
// attention_rows that have the spans of a row are a cluster, which merges them through its shared memory; WHOLE: whether a
// block of attention_groups has all spans of its rows and merges them (many groups), or one; STAGES: how many tiles
// attention_whole has in its ring; SPAN: 256 positions, of drafts, whose bits are nobody's promise, perhaps fewer.
// Context index j of a row stands in slot table[seq_row, j], or behind its prefix in its tail.
// Tiles of 64 and spans of SPAN positions begin at absolute multiples, so a row's sums do not depend on the rows beside it.
#include "wide.cuh"

using namespace vs;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && (HEAD_DIM == 64 || HEAD_DIM == 128)
#define WIDE 1  // attention_groups: products of 64 rows at once
#else
#define WIDE 0
#endif
constexpr int kTile = 64, kSpan = SPAN, kTiles = kSpan / kTile;
constexpr int kGroup = HEADS / KV_HEADS, kChunks = HEAD_DIM / 8, kMask = (kChunks & -kChunks) - 1;
constexpr bool kBoth = kGroup > 8;  // of a single row: whether rows g + 8 of a tile of 16 are heads at all
constexpr int kRecord = HEAD_DIM + 2;  // a span's result for one head: o, m, l
constexpr int kRowBytes = HEAD_DIM * 2, kColumns = HEAD_DIM / 8;
constexpr int kStage = 2 * kTile * kRowBytes;  // a tile of K and one of V

struct Args {
  const bf16* q;          // [rows, HEADS, HEAD_DIM]
  const bf16* k_store;    // [slots, KV_HEADS, HEAD_DIM]
  const bf16* v_store;
  bf16* out;              // [rows, HEADS, HEAD_DIM]
  const int* table;       // [sequence rows, table_width]
  const int* positions;   // [rows]
  const int* seq_rows;
  const int* prefix_lens;
  const int* tails;       // [rows, tail_width]
  const int* ready_lens;  // how much of a row's context was written before this pass
  const int* groups;      // prompt rows: first row and number of rows of each group
  float* partial;         // [rows, KV_HEADS, spans, kGroup, HEAD_DIM + 2]
  int* arrived;           // [rows, KV_HEADS], all 0 between launches
  int64 table_width;
  int tail_width;
  int first_row;
  int spans;              // the most spans a row of this launch has: grid z
  int window;             // how many positions a row sees, itself included
  float scale;            // log2(e) / sqrt(query scalar)
};

__device__ __forceinline__ int64 slot_of(const Args& a, int row, int64 seq_row, int prefix_len, int j) {
  return j < prefix_len ? a.table[seq_row * a.table_width + j]
                        : a.tails[static_cast<int64>(row) * a.tail_width + j - prefix_len];
}

// K is read eight bytes at a time from four rows at once, V by ldmatrix from eight rows at once: two ways to swizzle.
__device__ __forceinline__ int k_offset(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ ((row & 3) << 1 & kMask)) << 4);
}
__device__ __forceinline__ int v_offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7 & kMask)) << 4); }

// One store's positions [begin, end) into rows [begin - origin, end - origin) of a tile; zeros from `len` on.
// slots[j - origin] holds the slot of position j. A thread keeps its chunk of a row, and so its place in the swizzle.
template <bool KEYS, int THREADS>
__device__ __forceinline__ void fetch(const bf16* store, const int* slots, int kv_head, int origin, int begin, int end,
                                      int len, unsigned to) {
  constexpr int kRowsAtOnce = THREADS / kChunks, kStep = kRowsAtOnce < 8 ? kRowsAtOnce : kRowsAtOnce / 8 * 8;
  constexpr int kActive = kStep * kChunks;
  static_assert(kStep > 0, "a row needs as many threads as it has chunks");
  if (kActive < THREADS && threadIdx.x >= kActive) return;
  const int chunk = threadIdx.x % kChunks;
  const bf16* from = store + kv_head * HEAD_DIM + chunk * 8;
  int row = begin - origin + static_cast<int>(threadIdx.x) / kChunks;
  const auto place = [&] { return to + (KEYS ? k_offset(row, chunk) : v_offset(row, chunk)); };
  unsigned at = place();
#pragma unroll 4
  for (; row < end - origin; row += kStep, at += kStep * kRowBytes) {
    if (kStep % 8) at = place();  // rows a multiple of eight apart are swizzled alike
    copy16(at, from + static_cast<int64>(slots[row]) * (KV_HEADS * HEAD_DIM), origin + row < len);
  }
}

// s = chain(q, k) of 16 query rows and 8 COUNT positions. q holds columns 4 t .. 4 t + 3 of each 16.
template <int COUNT>
__device__ __forceinline__ void scores(float (*s)[4], const unsigned (*q)[4], const unsigned char* k, int g, int t) {
#pragma unroll
  for (int n = 0; n < COUNT; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step)  // all chains at once
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const uint2 b = *reinterpret_cast<const uint2*>(k + k_offset(n * 8 + g, 2 * step + (t >> 1)) + (t & 1) * 8);
      mma(s[n], q[step], &b.x);
    }
}

__device__ __forceinline__ void load_query(unsigned (*q)[4], const bf16* low, const bf16* high, int t) {
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    uint2 a = make_uint2(0, 0), b = make_uint2(0, 0);
    if (low != nullptr) a = *reinterpret_cast<const uint2*>(low + step * 16 + 4 * t);
    if (high != nullptr) b = *reinterpret_cast<const uint2*>(high + step * 16 + 4 * t);
    q[step][0] = a.x, q[step][1] = b.x, q[step][2] = a.y, q[step][3] = b.y;
  }
}

#if WIDE
// The same for attention_groups, into a tile as wide.cuh wants it.
__device__ __forceinline__ void fetch_wide(const bf16* store, const int* slots, int kv_head, int origin, int len, unsigned to) {
  constexpr int kStep = 128 / kChunks;  // rows at once, a multiple of eight: they are swizzled alike
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const bf16* from = store + kv_head * HEAD_DIM + chunk * 8;
  unsigned at = to + wide_offset<kTile>(first, chunk);
#pragma unroll
  for (int row = first; row < kTile; row += kStep, at += kStep * kWideColumn)
    copy16(at, from + static_cast<int64>(slots[row]) * (KV_HEADS * HEAD_DIM), origin + row < len);
}

// q in the order of columns that the tensor core has.
__device__ __forceinline__ void load_wide_query(unsigned (*q)[4], const bf16* low, const bf16* high, int t) {
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = step * 16 + half * 8 + 2 * t;
      q[step][2 * half] = low == nullptr ? 0 : *reinterpret_cast<const unsigned*>(low + at);
      q[step][2 * half + 1] = high == nullptr ? 0 : *reinterpret_cast<const unsigned*>(high + at);
    }
}

// s = chain(q, k) of the block's 64 query rows and a tile's positions.
__device__ __forceinline__ void wide_scores(float (*s)[4], const unsigned (*q)[4], unsigned keys) {
  wide_fence();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step)
    wide_mma64<0>(s, q[step], wide_operand(keys + step / 4 * kTile * kWideColumn + step % 4 * 32, 16), step > 0);
  wide_wait();
}

// o continued by chain(p, v).
__device__ __forceinline__ void wide_values(float (*o)[4], const unsigned (*p)[2], unsigned values) {
  wide_fence();
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    const unsigned w[4] = {p[2 * step][0], p[2 * step][1], p[2 * step + 1][0], p[2 * step + 1][1]};
    const uint64 v = wide_operand(values + step * 16 * kWideColumn, kTile * kWideColumn);
#if HEAD_DIM == 64
    wide_mma64<1>(o, w, v, 1);
#else
    wide_mma128<1>(o, w, v, 1);
#endif
  }
  wide_wait();
}
#endif

// Two k16 steps' worth of V for eight columns: positions first .. first + 31.
__device__ __forceinline__ void load_values(unsigned* v, unsigned values, int first, int column, int lane) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(values + v_offset(first + lane, column))
               : "memory");
}

__device__ __forceinline__ float masked(float s, float scale, int j, int len, int window) {
  const float value = mul(s, scale);
  return (j < len) & (j >= len - window) ? value : neg_inf();
}
// Weights behind a maximum of -inf are 0, so any finite number may stand for it.
__device__ __forceinline__ float subtracted(float m) { return m == neg_inf() ? 0.0f : m; }
__device__ __forceinline__ float weight(float s, float m) { return exp2_at_most_126(sub(s, m)); }
__device__ __forceinline__ float decay(float m, float next) { return next == neg_inf() ? 1.0f : exp2_at_most_126(sub(m, next)); }
__device__ __forceinline__ unsigned packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

constexpr unsigned kOnes = 0x3F803F80u;  // two bf16 ones

// Spans [begin, end) merged for element i of the outputs of a K/V head's heads; `load` gives a span's m and l of its head, and o.
template <typename Load>
__device__ __forceinline__ void merge_spans(const Load& load, int i, int begin, int end, bf16* out) {
  const int head = i / HEAD_DIM;
  constexpr int kAtOnce = 4;
  float m = neg_inf(), sum = 0.0f, value = 0.0f;
  for (int first = begin; first < end; first += kAtOnce) {
    float m_other[kAtOnce], l_other[kAtOnce], o_other[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {  // all loads before the first is used
      const bool there = first + n < end;
      m_other[n] = there ? load.m(first + n, head) : neg_inf();
      l_other[n] = there ? load.l(first + n, head) : 0.0f;
      o_other[n] = there ? load.o(first + n, i) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (m_other[n] == neg_inf()) continue;
      if (m == neg_inf()) {
        m = m_other[n], sum = l_other[n], value = o_other[n];
        continue;
      }
      const float top = fmaxf(m, m_other[n]), mine_by = exp2_at_most_126(sub(m, top));
      const float other_by = exp2_at_most_126(sub(m_other[n], top));
      value = add(mul(value, mine_by), mul(o_other[n], other_by));
      sum = add(mul(sum, mine_by), mul(l_other[n], other_by));
      m = top;
    }
  }
  out[i] = to_bf16(div(value, sum));
}

// A span's o, l and m merged into those of the spans before it, as merge_spans does, where they are in registers.
template <int COLUMNS, int HALVES>
__device__ __forceinline__ void merge_span(float (*all_o)[4], float* all_l, float* all_m, const float (*o)[4], const float* l,
                                           const float* m) {
#pragma unroll
  for (int i = 0; i < HALVES; ++i) {
    if (m[i] == neg_inf()) continue;
    const bool is_first = all_m[i] == neg_inf();
    const float top = fmaxf(all_m[i], m[i]), behind_by = is_first ? 0.0f : exp2_at_most_126(sub(all_m[i], top));
    const float by = exp2_at_most_126(sub(m[i], top));
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
      for (int e = 2 * i; e < 2 * i + 2; ++e)
        all_o[c][e] = is_first ? o[c][e] : add(mul(all_o[c][e], behind_by), mul(o[c][e], by));
    all_l[i] = is_first ? l[2 * i] : add(mul(all_l[i], behind_by), mul(l[2 * i], by));
    all_m[i] = top;
  }
}

// Records that lie in memory, of row and K/V head `pair`: read past the L1 cache, because other blocks wrote them.
struct Partial {
  const float* from;
  __device__ Partial(const Args& a, int64 pair) : from(a.partial + pair * a.spans * kGroup * kRecord) {}
  __device__ __forceinline__ float at(int span, int head, int i) const {
    return __ldcg(from + (static_cast<int64>(span) * kGroup + head) * kRecord + i);
  }
  __device__ __forceinline__ float m(int span, int head) const { return at(span, head, HEAD_DIM); }
  __device__ __forceinline__ float l(int span, int head) const { return at(span, head, HEAD_DIM + 1); }
  __device__ __forceinline__ float o(int span, int i) const { return at(span, i / HEAD_DIM, i % HEAD_DIM); }
};
__device__ __forceinline__ void write_state(float* record, float m, float l) {
  __stcg(record + HEAD_DIM, m);
  __stcg(record + HEAD_DIM + 1, l);
}

constexpr int kRowWarps = 8, kRowThreads = 32 * kRowWarps, kShare = kSpan / kRowWarps, kShareTiles = kShare / 8;
constexpr int kPerTile = kTile / kShare;  // warps that share a tile's scores
constexpr int kMostBlocks = 8, kOutputs = kGroup * HEAD_DIM, kTurns = (kOutputs + kRowThreads - 1) / kRowThreads;

// What the blocks of a cluster have put into this one's shared memory: all states, and the outputs that it merges, which are
// those of every num_blocks-th turn of its threads.
struct alignas(128) Gathered {
  float values[(kTurns + kMostBlocks - 1) * kRowThreads], tops[kMostBlocks][kGroup], sums[kMostBlocks][kGroup];
};
constexpr int kGatheredBytes = CLUSTER ? sizeof(Gathered) : 0;
struct Shared {
  Gathered& from;
  int first_span, num_blocks, turns;  // turns of a block
  __device__ Shared(Gathered& from, int first_span, int num_blocks)
      : from(from), first_span(first_span), num_blocks(num_blocks), turns((kTurns + num_blocks - 1) / num_blocks) {}
  __device__ __forceinline__ void put(int span, int i, float value) const {
    int block = i / kRowThreads, turn = 0;
    for (; block >= num_blocks; block -= num_blocks) ++turn;
    put_there(place(span, turn, i), first_span + block, value);
  }
  __device__ __forceinline__ void put_state(int span, int head, int block, float top, float sum) const {
    put_there(&from.tops[span - first_span][head], block, top);
    put_there(&from.sums[span - first_span][head], block, sum);
  }
  __device__ __forceinline__ float* place(int span, int turn, int i) const {
    return from.values + ((span - first_span) * turns + turn) * kRowThreads + i % kRowThreads;
  }
};
// Of one turn of a block.
struct Turn {
  const Shared& shared;
  int turn;
  __device__ __forceinline__ float m(int span, int head) const { return shared.from.tops[span - shared.first_span][head]; }
  __device__ __forceinline__ float l(int span, int head) const { return shared.from.sums[span - shared.first_span][head]; }
  __device__ __forceinline__ float o(int span, int i) const { return *shared.place(span, turn, i); }
};

// Every output of a K/V head's heads that a thread has, with its value and sum of weights.
template <int OWN, typename Put>
__device__ __forceinline__ void each_output(const float (*o)[4], const float* l, const Put& put) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int c = 0; c < OWN; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int head = g + (e < 2 ? 0 : 8), column = (warp + kRowWarps * c) * 8 + 2 * t + (e & 1);
      if (head < kGroup && warp + kRowWarps * c < kColumns) put(head * HEAD_DIM + column, o[c][e], l[e & 2]);
    }
}

// grid (spans, KV_HEADS, rows), 8 warps: one span of one row. The scores of the whole span at once, then the maxima in
// tile order, then each warp continues the chains over the span for its share of the columns. Spans are merged in ascending
// order: by the blocks of a cluster together, or by the last block of a row to arrive.
extern "C" __global__ void __launch_bounds__(kRowThreads) attention_rows(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float share_max[kRowWarps][16];
  __shared__ int slots[kSpan], last;
  constexpr int kStride = kSpan + 8, kOwn = (kColumns + kRowWarps - 1) / kRowWarps;
  const int span = blockIdx.x, kv_head = blockIdx.y, row = a.first_row + blockIdx.z, origin = span * kSpan;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int len = a.positions[row] + 1, first_span = max(0, len - a.window) / kSpan, spans = (len + kSpan - 1) / kSpan;
  const int prefix_len = a.prefix_lens[row], ready_len = a.ready_lens[row];
  const int64 seq_row = a.seq_rows[row];
  release_next();
  if (span < first_span || span >= spans) return;
  const int end = min(kSpan, (len - origin + kTile - 1) / kTile * kTile) + origin;
  const int ready = max(origin, min(end, ready_len)), tiles = (end - origin) / kTile;
  bf16* weights = reinterpret_cast<bf16*>(memory + kGatheredBytes);  // [16, kStride]
  const unsigned char* keys = memory + kGatheredBytes + 16 * kStride * 2;
  const unsigned k_to = shared_address(keys), v_to = k_to + (TWO_BUFFERS ? kSpan * kRowBytes : 0);
  if (threadIdx.x < kSpan)
    slots[threadIdx.x] = origin + threadIdx.x < len ? slot_of(a, row, seq_row, prefix_len, origin + threadIdx.x) : 0;
  __syncthreads();
  fetch<true, kRowThreads>(a.k_store, slots, kv_head, origin, origin, ready, len, k_to);
  if (TWO_BUFFERS) fetch<false, kRowThreads>(a.v_store, slots, kv_head, origin, origin, ready, len, v_to);
  if (CLUSTER) meet_cluster();  // from here on others may write into this block's shared memory
  wait_for_previous();
  fetch<true, kRowThreads>(a.k_store, slots, kv_head, origin, ready, end, len, k_to);
  if (TWO_BUFFERS) fetch<false, kRowThreads>(a.v_store, slots, kv_head, origin, ready, end, len, v_to);
  copy_commit();
  const bf16* q_row = a.q + (static_cast<int64>(row) * HEADS + kv_head * kGroup) * HEAD_DIM;
  unsigned q[HEAD_DIM / 16][4];
  load_query(q, g < kGroup ? q_row + g * HEAD_DIM : nullptr, g + 8 < kGroup ? q_row + (g + 8) * HEAD_DIM : nullptr, t);
  copy_wait<0>();
  __syncthreads();

  const int tile = warp / kPerTile;
  float s[kShareTiles][4], low = neg_inf(), high = neg_inf();
  if (tile < tiles) {
    scores<kShareTiles>(s, q, keys + warp * kShare * kRowBytes, g, t);
#pragma unroll
    for (int n = 0; n < kShareTiles; ++n)
#pragma unroll
      for (int e = 0; e < (kBoth ? 4 : 2); ++e) {
        s[n][e] = masked(s[n][e], a.scale, origin + warp * kShare + n * 8 + 2 * t + (e & 1), len, a.window);
        float& m = e < 2 ? low : high;
        m = fmaxf(m, s[n][e]);
      }
    low = quad_max(low), high = quad_max(high);
  }
  if (t == 0) share_max[warp][g] = low, share_max[warp][g + 8] = high;
  __syncthreads();
  if (!TWO_BUFFERS) {  // K has been read
    fetch<false, kRowThreads>(a.v_store, slots, kv_head, origin, origin, end, len, v_to);
    copy_commit();
  }
  float m_low[kTiles], m_high[kTiles];  // the running maximum after each tile
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    m_low[i] = i ? m_low[i - 1] : neg_inf(), m_high[i] = i ? m_high[i - 1] : neg_inf();
#pragma unroll
    for (int share = i * kPerTile; share < (i + 1) * kPerTile; ++share) {
      m_low[i] = fmaxf(m_low[i], share_max[share][g]);
      if (kBoth) m_high[i] = fmaxf(m_high[i], share_max[share][g + 8]);
    }
  }
  if (tile < tiles) {
    low = m_low[0], high = m_high[0];
#pragma unroll
    for (int i = 1; i < kTiles; ++i)
      if (i == tile) low = m_low[i], high = m_high[i];
    low = subtracted(low), high = subtracted(high);
#pragma unroll
    for (int n = 0; n < kShareTiles; ++n) {
      const int at = warp * kShare + n * 8 + 2 * t;
      *reinterpret_cast<unsigned*>(weights + g * kStride + at) = packed(weight(s[n][0], low), weight(s[n][1], low));
      *reinterpret_cast<unsigned*>(weights + (g + 8) * kStride + at) =
          kBoth ? packed(weight(s[n][2], high), weight(s[n][3], high)) : 0;
    }
  }
  copy_wait<0>();
  __syncthreads();

  float o[kOwn][4] = {}, l[4] = {};
  if (warp < kColumns)
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i >= tiles) break;
      const float low_by = decay(i ? m_low[i - 1] : neg_inf(), m_low[i]);
      const float high_by = kBoth ? decay(i ? m_high[i - 1] : neg_inf(), m_high[i]) : 1.0f;
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[c][e] = mul(o[c][e], e < 2 ? low_by : high_by);
      l[0] = mul(l[0], low_by), l[2] = mul(l[2], high_by);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = i * kTile + half * 32;
        unsigned v[kOwn][4];
#pragma unroll
        for (int c = 0; c < kOwn; ++c)
          if (warp + kRowWarps * c < kColumns) load_values(v[c], v_to, first, warp + kRowWarps * c, lane);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const bf16* p = weights + g * kStride + first + step * 16 + 2 * t;
          const unsigned w[4] = {*reinterpret_cast<const unsigned*>(p), *reinterpret_cast<const unsigned*>(p + 8 * kStride),
                                 *reinterpret_cast<const unsigned*>(p + 8),
                                 *reinterpret_cast<const unsigned*>(p + 8 * kStride + 8)};
          const unsigned ones[2] = {kOnes, kOnes};
          mma(l, w, ones);
#pragma unroll
          for (int c = 0; c < kOwn; ++c)
            if (warp + kRowWarps * c < kColumns) mma(o[c], w, v[c] + 2 * step);
        }
      }
    }

  const int64 pair = static_cast<int64>(row) * KV_HEADS + kv_head;
  bf16* out = a.out + (static_cast<int64>(row) * HEADS + kv_head * kGroup) * HEAD_DIM;
  const bool alone = spans - first_span == 1;
  if (alone) {
    each_output<kOwn>(o, l, [&](int i, float value, float sum) { out[i] = to_bf16(div(value, sum)); });
    return;
  }
#if CLUSTER
  const Shared shared(*reinterpret_cast<Gathered*>(&memory[0]), first_span, spans - first_span);
  each_output<kOwn>(o, l, [&](int i, float value, float) { shared.put(span, i, value); });
  if (warp == 0)
    for (int block = first_span + t; block < spans; block += 4) {
      if (g < kGroup) shared.put_state(span, g, block, m_low[kTiles - 1], l[0]);
      if (g + 8 < kGroup) shared.put_state(span, g + 8, block, m_high[kTiles - 1], l[2]);
    }
  meet_cluster();
  for (int turn = 0; turn < shared.turns; ++turn) {
    const int i = (turn * shared.num_blocks + span - first_span) * kRowThreads + threadIdx.x;
    if (i < kOutputs) merge_spans(Turn{shared, turn}, i, first_span, spans, out);
  }
#else
  float* mine = a.partial + (pair * a.spans + span) * kGroup * kRecord;
  each_output<kOwn>(o, l, [&](int i, float value, float) { __stcg(mine + i / HEAD_DIM * kRecord + i % HEAD_DIM, value); });
  if (warp == 0 && t == 0) {
    if (g < kGroup) write_state(mine + g * kRecord, m_low[kTiles - 1], l[0]);
    if (g + 8 < kGroup) write_state(mine + (g + 8) * kRecord, m_high[kTiles - 1], l[2]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(a.arrived + pair, 1) == spans - first_span - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = threadIdx.x; i < kGroup * HEAD_DIM; i += kRowThreads) merge_spans(Partial(a, pair), i, first_span, spans, out);
  if (threadIdx.x == 0) a.arrived[pair] = 0;
#endif
}

constexpr int kWholeWarps = HEAD_DIM > 64 ? 8 : 4, kWholeThreads = 32 * kWholeWarps;

// grid (KV_HEADS, rows): all spans of one row, for so many rows that their blocks fill the SMs. Tiles of K and V come through
// a ring that is never empty from the first to the last, and spans are merged in registers. Of a tile, warps share the scores
// by positions and the values by columns, as in attention_rows; the values of a tile are taken beside the scores of the next,
// so that two barriers do for a tile.
extern "C" __global__ void __launch_bounds__(kWholeThreads, HEAD_DIM > 128 ? 1 : HEAD_DIM > 64 ? 2 : 4) attention_whole(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];  // the ring, then the slots of all positions
  constexpr int kShares = kTile / 8 / kWholeWarps, kOwn = (kColumns + kWholeWarps - 1) / kWholeWarps;
  constexpr int kHalves = kBoth ? 2 : 1, kAtOnce = 4;
  __shared__ float share_max[kWholeWarps][16];
  __shared__ unsigned weights[16][kTile / 2 + 4];  // pairs of bf16
  const int kv_head = blockIdx.x, row = a.first_row + blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int len = a.positions[row] + 1, prefix_len = a.prefix_lens[row], ready_len = a.ready_lens[row];
  const int64 seq_row = a.seq_rows[row];
  release_next();
  const int begin = max(0, len - a.window) / kTile, end = (len + kTile - 1) / kTile;  // tiles
  int* slots = reinterpret_cast<int*>(memory + STAGES * kStage) - begin * kTile;
  for (int first = begin * kTile + threadIdx.x; first < end * kTile; first += kAtOnce * kWholeThreads) {
    int found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // all loads before the first is used
      const int j = first + i * kWholeThreads;
      found[i] = j < len ? slot_of(a, row, seq_row, prefix_len, j) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * kWholeThreads < end * kTile) slots[first + i * kWholeThreads] = found[i];
  }
  __syncthreads();
  const unsigned base = shared_address(memory);
  const auto fetch_tile = [&](int tile) {
    const int origin = tile * kTile;
    const unsigned to = base + tile % STAGES * kStage;
    if (tile < end) {
      fetch<true, kWholeThreads>(a.k_store, slots + origin, kv_head, origin, origin, origin + kTile, len, to);
      fetch<false, kWholeThreads>(a.v_store, slots + origin, kv_head, origin, origin, origin + kTile, len, to + kStage / 2);
    }
    copy_commit();
  };
  int fetched = begin;
  for (; fetched < begin + STAGES && (fetched + 1) * kTile <= ready_len; ++fetched) fetch_tile(fetched);
  wait_for_previous();
  for (; fetched < begin + STAGES; ++fetched) fetch_tile(fetched);
  const int64 heads = (static_cast<int64>(row) * HEADS + kv_head * kGroup) * HEAD_DIM;
  const bf16* q_row = a.q + heads;
  unsigned q[HEAD_DIM / 16][4];
  load_query(q, g < kGroup ? q_row + g * HEAD_DIM : nullptr, g + 8 < kGroup ? q_row + (g + 8) * HEAD_DIM : nullptr, t);

  float o[kOwn][4] = {}, l[4] = {}, m[2] = {neg_inf(), neg_inf()}, by[kHalves];
  float all_o[kOwn][4] = {}, all_l[2] = {}, all_m[2] = {neg_inf(), neg_inf()};  // of the spans behind
  const auto merge = [&] { merge_span<kOwn, kHalves>(all_o, all_l, all_m, o, l, m); };
  const auto add_values = [&](int tile) {
    const unsigned values = base + tile % STAGES * kStage + kStage / 2;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) o[c][2 * i] = mul(o[c][2 * i], by[i]), o[c][2 * i + 1] = mul(o[c][2 * i + 1], by[i]);
      l[2 * i] = mul(l[2 * i], by[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned v[kOwn][4];
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
        if (warp + kWholeWarps * c < kColumns) load_values(v[c], values, half * 32, warp + kWholeWarps * c, lane);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const unsigned* low = weights[g] + half * 16 + step * 8 + t;
        const unsigned* high = weights[g + 8] + half * 16 + step * 8 + t;
        const unsigned w[4] = {low[0], kBoth ? high[0] : 0, low[4], kBoth ? high[4] : 0}, ones[2] = {kOnes, kOnes};
        mma(l, w, ones);
#pragma unroll
        for (int c = 0; c < kOwn; ++c)
          if (warp + kWholeWarps * c < kColumns) mma(o[c], w, v[c] + 2 * step);
      }
    }
    if ((tile + 1) % kTiles) return;
    merge();
#pragma unroll
    for (int c = 0; c < kOwn; ++c) o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0.0f;
    l[0] = l[1] = l[2] = l[3] = 0.0f, m[0] = m[1] = neg_inf();
  };
  for (int tile = begin; tile < end; ++tile) {
    if (tile == begin) copy_wait<STAGES - 1>();
    else copy_wait<STAGES - 2>();
    __syncthreads();  // this tile is there, and so are the weights of the one before
    float s[kShares][4], top[2] = {neg_inf(), neg_inf()};
    scores<kShares>(s, q, memory + tile % STAGES * kStage + warp * kShares * 8 * kRowBytes, g, t);
#pragma unroll
    for (int n = 0; n < kShares; ++n)
#pragma unroll
      for (int e = 0; e < 2 * kHalves; ++e) {
        const int j = tile * kTile + (warp * kShares + n) * 8 + 2 * t + (e & 1);
        s[n][e] = masked(s[n][e], a.scale, j, len, a.window);
        top[e / 2] = fmaxf(top[e / 2], s[n][e]);
      }
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      top[i] = quad_max(top[i]);
      if (t == 0) share_max[warp][g + 8 * i] = top[i];
    }
    if (tile > begin) add_values(tile - 1);
    __syncthreads();  // all maxima are there, and the tile before is done with
    if (tile > begin) fetch_tile(tile - 1 + STAGES);
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      float next = m[i];
#pragma unroll
      for (int share = 0; share < kWholeWarps; ++share) next = fmaxf(next, share_max[share][g + 8 * i]);
      by[i] = decay(m[i], next), m[i] = next;
      const float less = subtracted(next);
#pragma unroll
      for (int n = 0; n < kShares; ++n)
        weights[g + 8 * i][(warp * kShares + n) * 4 + t] = packed(weight(s[n][2 * i], less), weight(s[n][2 * i + 1], less));
    }
  }
  __syncthreads();
  add_values(end - 1);
  merge();
#pragma unroll
  for (int i = 0; i < kHalves; ++i)
#pragma unroll
    for (int c = 0; c < kOwn; ++c)
      if (g + 8 * i < kGroup && warp + kWholeWarps * c < kColumns)
        *reinterpret_cast<unsigned*>(a.out + heads + (g + 8 * i) * HEAD_DIM + (warp + kWholeWarps * c) * 8 + 2 * t) =
            packed(div(all_o[c][2 * i], all_l[i]), div(all_o[c][2 * i + 1], all_l[i]));
}

// grid (groups, KV_HEADS, spans), 4 warps: one span of up to 64 / kGroup consecutive rows of one sequence whose contexts
// are prefixes of the last row's; a warp holds 16 pairs of row and head. For rows with several spans attention_merge follows,
// unless WHOLE: then a block has all spans.
extern "C" __global__ void __launch_bounds__(128, HEAD_DIM > 128 ? 1 : WHOLE ? 2 : 3) attention_groups(const Args a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ int slots[3][kTile];  // of the tiles in hand, on their way, and behind them
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, kv_head = blockIdx.y;
  const int group = gridDim.x - 1 - blockIdx.x;  // the longest contexts of a prompt first
  const int first = a.groups[2 * group], count = a.groups[2 * group + 1], final_row = first + max(count, 1) - 1;
  const int shortest = a.positions[first] + 1, longest = a.positions[final_row] + 1;
  const int first_tile = max(0, shortest - a.window) / kTile;
  const int first_span = first_tile / kTiles, spans = (longest + kSpan - 1) / kSpan, span = WHOLE ? first_span : blockIdx.z;
  release_next();
  if (count == 0 || span < first_span || span >= spans) {  // a captured launch may have more groups than a pass
    if (group == 0) wait_for_previous();  // somebody must: what follows is told of the kernel in front by this one alone
    return;
  }
  const int last_tile = (longest + kTile - 1) / kTile;
  const int begin = max(first_tile, span * kTiles), end = WHOLE ? last_tile : min(last_tile, (span + 1) * kTiles);
  wait_for_previous();
  int len[2];
  const bf16* q_row[2];
  int64 to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pair = warp * 16 + i * 8 + g, row = first + pair / kGroup;
    const bool valid = pair < count * kGroup;
    len[i] = valid ? a.positions[row] + 1 : 0;
    to[i] = (static_cast<int64>(row) * HEADS + kv_head * kGroup + pair % kGroup) * HEAD_DIM;
    q_row[i] = valid ? a.q + to[i] : nullptr;
  }
  unsigned q[HEAD_DIM / 16][4];
#if WIDE
  load_wide_query(q, q_row[0], q_row[1], t);
#else
  load_query(q, q_row[0], q_row[1], t);
#endif
  const unsigned base = shared_address(memory);
  float o[kColumns][4] = {}, l[4] = {}, m[2] = {neg_inf(), neg_inf()};
  float all_o[WHOLE ? kColumns : 1][4], all_l[2] = {}, all_m[2] = {neg_inf(), neg_inf()};  // of the spans behind
  const auto merge = [&] { merge_span<WHOLE ? kColumns : 0, 2>(all_o, all_l, all_m, o, l, m); };
  const int64 seq_row = a.seq_rows[final_row];
  const int prefix_len = a.prefix_lens[final_row];
  const auto slot_at = [&](int j) { return j < longest ? static_cast<int>(slot_of(a, final_row, seq_row, prefix_len, j)) : 0; };
  const auto fetch_tile = [&](int tile) {
    const unsigned to = base + (tile & 1) * kStage;
#if WIDE
    fetch_wide(a.k_store, slots[tile % 3], kv_head, tile * kTile, longest, to);
    fetch_wide(a.v_store, slots[tile % 3], kv_head, tile * kTile, longest, to + kStage / 2);
#else
    fetch<true, 128>(a.k_store, slots[tile % 3], kv_head, tile * kTile, tile * kTile, (tile + 1) * kTile, longest, to);
    fetch<false, 128>(a.v_store, slots[tile % 3], kv_head, tile * kTile, tile * kTile, (tile + 1) * kTile, longest, to + kStage / 2);
#endif
    copy_commit();
  };
  const int half = threadIdx.x / kTile, place = threadIdx.x % kTile;
  slots[(begin + half) % 3][place] = slot_at((begin + half) * kTile + place);
  __syncthreads();
  fetch_tile(begin);
  for (int tile = begin; tile < end; ++tile) {
    const int stage = tile & 1;
    int later = 0;
    if (half == 0) later = slot_at((tile + 2) * kTile + place);
    if (tile + 1 < end) fetch_tile(tile + 1);
    else copy_commit();
    copy_wait<1>();
#if WIDE
    wide_written();
#endif
    __syncthreads();
    float s[8][4];
#if WIDE
    wide_scores(s, q, base + stage * kStage);
#else
    scores<8>(s, q, memory + stage * kStage, g, t);
#endif
    float top[2] = {neg_inf(), neg_inf()};
    if ((tile + 1) * kTile <= shortest && tile * kTile >= longest - a.window) {  // every row sees all of it
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = mul(s[n][e], a.scale);
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[n][e] = masked(s[n][e], a.scale, tile * kTile + n * 8 + 2 * t + (e & 1), len[e / 2], a.window);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[n][e]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(m[i], quad_max(top[i]));
      const float by = decay(m[i], top[i]);
      m[i] = top[i];
      l[2 * i] = mul(l[2 * i], by);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) o[c][2 * i] = mul(o[c][2 * i], by), o[c][2 * i + 1] = mul(o[c][2 * i + 1], by);
    }
    unsigned p[8][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float by = subtracted(m[i]);
#pragma unroll
      for (int n = 0; n < 8; ++n) p[n][i] = packed(weight(s[n][2 * i], by), weight(s[n][2 * i + 1], by));
    }
    const unsigned values = base + stage * kStage + kStage / 2;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int n = part * 4 + step * 2;
        const unsigned w[4] = {p[n][0], p[n][1], p[n + 1][0], p[n + 1][1]}, ones[2] = {kOnes, kOnes};
        mma(l, w, ones);
      }
#if !WIDE
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        unsigned v[4];
        load_values(v, values, part * 32, c, lane);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const int n = part * 4 + step * 2;
          const unsigned w[4] = {p[n][0], p[n][1], p[n + 1][0], p[n + 1][1]};
          mma(o[c], w, v + 2 * step);
        }
      }
#endif
    }
#if WIDE
    wide_values(o, p, values);
#endif
    if (half == 0) slots[(tile + 2) % 3][place] = later;
    __syncthreads();
    if (WHOLE && (tile + 1) % kTiles == 0) {
      merge();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0.0f;
      l[0] = l[1] = l[2] = l[3] = 0.0f, m[0] = m[1] = neg_inf();
    }
  }
  if (WHOLE) merge();

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (WHOLE) {
      if (q_row[i] != nullptr)
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          *reinterpret_cast<unsigned*>(a.out + to[i] + c * 8 + 2 * t) =
              packed(div(all_o[WHOLE ? c : 0][2 * i], all_l[i]), div(all_o[WHOLE ? c : 0][2 * i + 1], all_l[i]));
      continue;
    }
    const int own_first = max(0, len[i] - a.window) / kSpan, own_spans = (len[i] + kSpan - 1) / kSpan;
    if (q_row[i] == nullptr || span < own_first || span >= own_spans) continue;
    const bool alone = own_spans - own_first == 1;
    const int pair = warp * 16 + i * 8 + g;
    const int64 at = static_cast<int64>(first + pair / kGroup) * KV_HEADS + kv_head;
    float* record = a.partial + ((at * a.spans + span) * kGroup + pair % kGroup) * kRecord;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float low = o[c][2 * i], high = o[c][2 * i + 1];
      if (alone)
        *reinterpret_cast<unsigned*>(a.out + to[i] + c * 8 + 2 * t) = packed(div(low, l[2 * i]), div(high, l[2 * i]));
      else
        __stcg(reinterpret_cast<float2*>(record + c * 8 + 2 * t), make_float2(low, high));
    }
    if (!alone && t == 0) write_state(record, m[i], l[2 * i]);
  }
}

// grid (rows, KV_HEADS): what attention_groups left for each span of rows first_row and on, merged.
extern "C" __global__ void __launch_bounds__(128) attention_merge(const Args a) {
  release_next();
  const int row = a.first_row + blockIdx.x, kv_head = blockIdx.y, len = a.positions[row] + 1;
  const int first_span = max(0, len - a.window) / kSpan, spans = (len + kSpan - 1) / kSpan;
  bf16* out = a.out + (static_cast<int64>(row) * HEADS + kv_head * kGroup) * HEAD_DIM;
  wait_for_previous();  // all of them: what follows this kernel is told of the one in front by it alone
  if (spans - first_span == 1) return;
  for (int i = threadIdx.x; i < kGroup * HEAD_DIM; i += 128)
    merge_spans(Partial(a, static_cast<int64>(row) * KV_HEADS + kv_head), i, first_span, spans, out);
}
