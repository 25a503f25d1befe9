// The draw on the device, with the bits of verispec/sampling: argmax of z + noise with the smallest id on a tie, filters
// without sorting, and log-probabilities from integer sums. Nothing here depends on how the vocabulary is cut.
// An id's place in an order is one 64-bit key, so that a maximum or a minimum decides ties too. With MASKED, rows see only
// what their row of the mask table allows.
#include "arithmetic.cuh"

using namespace vs;

typedef unsigned long long uint64;
constexpr int kThreads = 256;
constexpr uint64 kNaNKey = ~0ull;

struct Args {
  const float* raw;            // [rows, vocab]
  const float* edited;         // [rows, vocab], or the same
  const unsigned* seeds;       // [rows, 2], low word first
  const unsigned* counters;    // [rows, 3]: t, sample index, stream
  const float* temperature;    // [rows]
  const int* top_k;            // [rows], 0 is off
  const float* top_p;          // [rows], 1 is off
  const float* log_min_p;      // [rows], -inf is off
  const int* masks;            // [rows], rows of the mask table; 0 allows everything
  const unsigned* allowed;     // [masks, mask_words]: bit i % 32 of word i / 32 allows token i
  uint64* tops;                // [rows, 2, chunks]: best of edited, best of raw
  uint64* best;                // [rows, chunks]: best of z + noise
  int64* sums;                 // [rows, chunks]: weights of the raw logits
  uint64* kept;                // [rows]: the last kept key of the order (-z, id)
  int* token_ids;              // [rows], -1 where there is nothing to draw
  float* logprobs;             // [rows]
  int64* keys;                 // [rows, vocab]: places in the order by score, ascending as signed numbers
  float* shares;               // [rows, vocab]: probabilities
  int vocab;
  int mask_words;
  int chunk;                   // ids of one block, a multiple of 4: as suits the number of rows
  int chunks;
};

__device__ __forceinline__ unsigned ordered(float v) {  // unsigned numbers in the order of floats; -0 is 0
  const int bits = __float_as_int(add(v, 0.0f));
  return static_cast<unsigned>(bits < 0 ? ~bits : bits ^ 0x80000000);
}
__device__ __forceinline__ float value_of(unsigned order) {
  return __int_as_float(static_cast<int>(order & 0x80000000u ? order ^ 0x80000000u : ~order));
}
__device__ __forceinline__ uint64 best_key(float v, int id) {  // the largest is the best; among equals the smallest id
  if (v != v) return kNaNKey;
  return static_cast<uint64>(ordered(v)) << 32 | (0xffffffffu - id);
}
__device__ __forceinline__ uint64 rank_key(float z, int id) {  // ascending in the order (-z, id)
  return static_cast<uint64>(~ordered(z)) << 32 | static_cast<unsigned>(id);
}

// A logit behind all edits. A mask makes no row usable: NaN and +inf stay what they say.
__device__ __forceinline__ float processed(const Args& a, int row, int id) {
  const float v = a.edited[static_cast<int64>(row) * a.vocab + id];
#ifdef MASKED
  const int mask = a.masks[row];
  if (mask > 0 && !(a.allowed[static_cast<int64>(mask) * a.mask_words + id / 32] >> (id % 32) & 1))
    return v < -neg_inf() ? neg_inf() : __int_as_float(0x7fc00000);
#endif
  return v;
}
__device__ __forceinline__ bool is_raw(const Args& a) {  // whether nothing was edited
#ifdef MASKED
  return false;
#else
  return a.raw == a.edited;
#endif
}

__device__ __forceinline__ float exp_f32(float x) {  // as native/maths.h has it, for x up to 0
  const float c = x < -87.0f ? -87.0f : x;
  const float n = sub(add(mul(c, 1.44269504f), 12582912.0f), 12582912.0f);
  const float r = sub(sub(c, mul(n, 0.693359375f)), mul(n, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = add(mul(p, r), 1.3981999507e-3f);
  p = add(mul(p, r), 8.3334519073e-3f);
  p = add(mul(p, r), 4.1665795894e-2f);
  p = add(mul(p, r), 1.6666665459e-1f);
  p = add(mul(p, r), 5.0000001201e-1f);
  const float y = add(add(mul(mul(p, r), r), r), 1.0f);
  const float scale = __int_as_float((static_cast<int>(n) + 127) << 23);
  return x < -87.0f ? 0.0f : mul(y, scale);
}

__device__ __forceinline__ float log_f32(float x) {  // as native/maths.h has it, for positive normal values
  const int bits = __float_as_int(x), e = (bits - 0x3F3504F3) >> 23;
  const float m = __int_as_float(bits - e * (1 << 23));
  const float s = div(sub(m, 1.0f), add(m, 1.0f)), z = mul(s, s);
  const float third = float(1.0 / 3), fifth = float(1.0 / 5), seventh = float(1.0 / 7), ninth = float(1.0 / 9);
  const float series = mul(z, add(third, mul(z, add(fifth, mul(z, add(seventh, mul(z, ninth)))))));
  const float exponent = static_cast<float>(e), twice = add(s, s);
  return add(mul(exponent, 0.693145751953125f), add(twice, add(mul(twice, series), mul(exponent, 1.428606765330187e-06f))));
}

__device__ __forceinline__ float gumbel_f32(unsigned word) {
  float u = mul(add(__uint2float_rn(word), 0.5f), 2.3283064365386963e-10f);
  u = u < 0.999999940395355224609375f ? u : 0.999999940395355224609375f;
  const float w = sub(1.0f, u);
  const float e = -sub(log_f32(w), div(add(sub(w, 1.0f), u), w));
  return -log_f32(e);
}

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

__device__ __forceinline__ int64 weight(float z) { return __float2ll_rn(mul(exp_f32(z), 1099511627776.0f)); }

template <typename T, typename F>
__device__ __forceinline__ T block_reduce(T v, F combine) {  // the result is in every thread; order-free operations only
  __shared__ T partial[32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  v = partial[0];
  for (int i = 1; i < blockDim.x / 32; ++i) v = combine(v, partial[i]);
  return v;
}
struct Max { __device__ uint64 operator()(uint64 a, uint64 b) const { return a > b ? a : b; } };
struct Sum { __device__ int64 operator()(int64 a, int64 b) const { return a + b; } };

__device__ __forceinline__ uint64 best_of_chunks(const uint64* keys, int chunks) {
  uint64 best = 0;
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) best = Max()(best, keys[i]);
  return block_reduce(best, Max());
}

__device__ __forceinline__ bool usable(uint64 top) {  // no NaN, and a finite maximum
  return top != kNaNKey && fabsf(value_of(static_cast<unsigned>(top >> 32))) <= 3.4028234664e38f;
}

// grid (chunks, rows): the largest logit of each chunk.
extern "C" __global__ void __launch_bounds__(kThreads) draw_top(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk);
  const float* raw = a.raw + static_cast<int64>(row) * a.vocab;
  uint64 best = 0, best_raw = 0;
  for (int id = blockIdx.x * a.chunk + threadIdx.x; id < end; id += kThreads) {
    best = Max()(best, best_key(processed(a, row, id), id));
    if (!is_raw(a)) best_raw = Max()(best_raw, best_key(raw[id], id));
  }
  best = block_reduce(best, Max());
  best_raw = is_raw(a) ? best : block_reduce(best_raw, Max());
  if (threadIdx.x > 0) return;
  a.tops[(static_cast<int64>(row) * 2) * a.chunks + blockIdx.x] = best;
  a.tops[(static_cast<int64>(row) * 2 + 1) * a.chunks + blockIdx.x] = best_raw;
}

__device__ __forceinline__ float scaled(float logit, float top, float temperature) {
  return div(sub(logit, top), temperature);
}

// Which key of the order (-z, id) is the first at which the counts (or the weights) of all before it and its own reach
// `needed`: digits of 11 bits, most significant first. By one block of 1024 threads.
template <bool WEIGHTS>
__device__ uint64 select_key(const Args& a, int row, float top, float temperature, int64 needed) {
  __shared__ int64 bins[2048];
  __shared__ uint64 prefix;
  __shared__ int64 before;
  if (threadIdx.x == 0) prefix = 0, before = 0;
  for (int shift = 53; shift > -11; shift -= 11) {
    const int low = max(shift, 0), digits = shift < 0 ? 11 + shift : 11;
    for (int i = threadIdx.x; i < 2048; i += 1024) bins[i] = 0;
    __syncthreads();
    const uint64 known = prefix;
    for (int id = threadIdx.x; id < a.vocab; id += 1024) {
      const float z = scaled(processed(a, row, id), top, temperature);
      const uint64 key = rank_key(z, id);
      if (low + digits < 64 && key >> (low + digits) != known) continue;
      const int64 amount = WEIGHTS ? weight(z) : 1;
      if (amount) atomicAdd(reinterpret_cast<uint64*>(&bins[key >> low & ((1 << digits) - 1)]), static_cast<uint64>(amount));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = 0;
      for (; bin < (1 << digits) - 1 && before + bins[bin] < needed; ++bin) before += bins[bin];
      prefix = known << digits | bin;
    }
    __syncthreads();
  }
  const uint64 key = prefix;
  __syncthreads();
  return key;
}

// grid (rows), 1024 threads: how far the filters let the order (-z, id) run.
extern "C" __global__ void __launch_bounds__(1024) draw_filter(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.x;
  const uint64 best = best_of_chunks(a.tops + static_cast<int64>(row) * 2 * a.chunks, a.chunks);
  const float temperature = a.temperature[row], top_p = a.top_p[row], log_min_p = a.log_min_p[row];
  const int top_k = a.top_k[row];
  uint64 kept = kNaNKey;
  if (usable(best) && temperature > 0.0f) {
    const float top = value_of(static_cast<unsigned>(best >> 32));
    int64 keep = a.vocab;
    if (log_min_p > neg_inf()) {
      int64 count = 0;
      for (int id = threadIdx.x; id < a.vocab; id += 1024) count += scaled(processed(a, row, id), top, temperature) >= log_min_p;
      keep = block_reduce(count, Sum());
    }
    if (top_k > 0 && top_k < keep) keep = top_k;
    if (keep < a.vocab) kept = select_key<false>(a, row, top, temperature, keep > 1 ? keep : 1);
    if (top_p < 1.0f) {
      int64 sum = 0;
      for (int id = threadIdx.x; id < a.vocab; id += 1024) {
        const float z = scaled(processed(a, row, id), top, temperature);
        if (rank_key(z, id) <= kept) sum += weight(z);
      }
      sum = block_reduce(sum, Sum());
      const int64 needed = static_cast<int64>(ceil(__dmul_rn(static_cast<double>(top_p), __ll2double_rn(sum))));
      const uint64 nucleus = select_key<true>(a, row, top, temperature, needed > 1 ? needed : 1);
      kept = nucleus < kept ? nucleus : kept;
    }
  }
  if (threadIdx.x == 0) a.kept[row] = kept;
}

// grid (chunks, rows): the best of z + noise among what is kept, and the sum of the raw logits' weights.
extern "C" __global__ void __launch_bounds__(kThreads) draw_best(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk);
  const uint64* tops = a.tops + static_cast<int64>(row) * 2 * a.chunks;
  const uint64 top_key = best_of_chunks(tops, a.chunks), raw_key = best_of_chunks(tops + a.chunks, a.chunks);
  const float* raw = a.raw + static_cast<int64>(row) * a.vocab;
  const float top = value_of(static_cast<unsigned>(top_key >> 32)), raw_top = value_of(static_cast<unsigned>(raw_key >> 32));
  const float temperature = a.temperature[row];
  const bool draws = temperature > 0.0f && usable(top_key), sums = usable(raw_key);
  const uint64 kept = a.kept[row];
  const unsigned *counter = a.counters + row * 3, *seed = a.seeds + row * 2;
  uint64 best = temperature > 0.0f ? 0 : top_key;
  // The largest logit has z = 0 and passes every filter: nothing below its noise can win. As g <= -log u, an id whose word
  // is above e^(z - bound) has z + g below the bound; the margin is far above every rounding.
  const int top_id = static_cast<int>(0xffffffffu - static_cast<unsigned>(top_key));
  const float bound = draws ? gumbel_f32(word_of(philox(top_id >> 2, counter[0], counter[1], counter[2], seed[0], seed[1]), top_id & 3)) : 0.0f;
  int64 sum = 0;
  for (int block = (blockIdx.x * a.chunk) / 4 + threadIdx.x; block * 4 < end; block += kThreads) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (draws) words = philox(block, counter[0], counter[1], counter[2], seed[0], seed[1]);
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const int id = block * 4 + lane;
      if (id >= end) break;
      if (sums) sum += weight(sub(raw[id], raw_top));
      if (!draws) continue;
      const float z = scaled(processed(a, row, id), top, temperature), above = sub(z, bound);
      const unsigned word = word_of(words, lane);
      if (above < 0.0f && mul(__uint2float_rn(word), 2.3283064365386963e-10f) > mul(exp_f32(above), 1.01f)) continue;
      if (z > neg_inf() && rank_key(z, id) <= kept) best = Max()(best, best_key(add(z, gumbel_f32(word)), id));
    }
  }
  best = block_reduce(best, Max());
  sum = block_reduce(sum, Sum());
  if (threadIdx.x > 0) return;
  a.best[static_cast<int64>(row) * a.chunks + blockIdx.x] = usable(top_key) ? best : kNaNKey;
  a.sums[static_cast<int64>(row) * a.chunks + blockIdx.x] = sum;
}

// grid (chunks, rows): where each id stands among a row's children, and the sum of weights of those that can be one. At T = 0
// by the logits alone, without filters.
extern "C" __global__ void __launch_bounds__(kThreads) draw_children(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk);
  const uint64 top_key = best_of_chunks(a.tops + static_cast<int64>(row) * 2 * a.chunks, a.chunks);
  const float top = value_of(static_cast<unsigned>(top_key >> 32)), temperature = a.temperature[row];
  const bool noisy = temperature > 0.0f;
  const uint64 kept = noisy ? a.kept[row] : kNaNKey;
  const unsigned *counter = a.counters + row * 3, *seed = a.seeds + row * 2;
  int64 sum = 0;
  for (int id = blockIdx.x * a.chunk + threadIdx.x; id < end; id += kThreads) {
    const float value = processed(a, row, id), z = scaled(value, top, noisy ? temperature : 1.0f);
    uint64 key = 0;
    if (usable(top_key) && z > neg_inf() && rank_key(z, id) <= kept) {
      sum += weight(z);
      float score = value;
      if (noisy) score = add(z, gumbel_f32(word_of(philox(id >> 2, counter[0], counter[1], counter[2], seed[0], seed[1]), id & 3)));
      key = best_key(score, id);
    }
    a.keys[static_cast<int64>(row) * a.vocab + id] = static_cast<int64>(key ^ 1ull << 63);
  }
  sum = block_reduce(sum, Sum());
  if (threadIdx.x == 0) a.sums[static_cast<int64>(row) * a.chunks + blockIdx.x] = sum;
}

// grid (chunks, rows), behind draw_children: what each id's weight is of them all; at T = 0 the best has everything. A row
// that is not usable has NaN throughout.
extern "C" __global__ void __launch_bounds__(kThreads) draw_shares(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk);
  const uint64 top_key = best_of_chunks(a.tops + static_cast<int64>(row) * 2 * a.chunks, a.chunks);
  const float top = value_of(static_cast<unsigned>(top_key >> 32)), temperature = a.temperature[row];
  int64 sum = 0;
  for (int i = threadIdx.x; i < a.chunks; i += kThreads) sum += a.sums[static_cast<int64>(row) * a.chunks + i];
  const float total = mul(__ll2float_rn(block_reduce(sum, Sum())), 9.094947017729282e-13f);  // 2^-40
  for (int id = blockIdx.x * a.chunk + threadIdx.x; id < end; id += kThreads) {
    const int64 at = static_cast<int64>(row) * a.vocab + id;
    float share = 0.0f;
    if (temperature > 0.0f) {
      if (a.keys[at] != static_cast<int64>(1ull << 63)) share = div(exp_f32(scaled(processed(a, row, id), top, temperature)), total);
    } else if (id == static_cast<int>(0xffffffffu - static_cast<unsigned>(top_key))) {
      share = 1.0f;
    }
    a.shares[at] = usable(top_key) ? share : __int_as_float(0x7fc00000);
  }
}

// grid (rows), 32 threads: the token and its raw log-probability.
extern "C" __global__ void __launch_bounds__(32) draw_token(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.x;
  const uint64 best = best_of_chunks(a.best + static_cast<int64>(row) * a.chunks, a.chunks);
  const uint64 raw_key = best_of_chunks(a.tops + (static_cast<int64>(row) * 2 + 1) * a.chunks, a.chunks);
  int64 sum = 0;
  for (int i = threadIdx.x; i < a.chunks; i += 32) sum += a.sums[static_cast<int64>(row) * a.chunks + i];
  sum = block_reduce(sum, Sum());
  if (threadIdx.x > 0) return;
  const bool drawn = best != kNaNKey;
  const int id = drawn ? static_cast<int>(0xffffffffu - static_cast<unsigned>(best)) : -1;
  a.token_ids[row] = id;
  float logprob = __int_as_float(0x7fc00000);
  if (drawn && usable(raw_key)) {
    const float log_total = log_f32(mul(__ll2float_rn(sum), 9.094947017729282e-13f));  // 2^-40
    logprob = sub(sub(a.raw[static_cast<int64>(row) * a.vocab + id], value_of(static_cast<unsigned>(raw_key >> 32))), log_total);
  }
  a.logprobs[row] = logprob;
}

struct AdvanceArgs {
  const int* drawn;  // [rows]
  int* token_ids;    // the pass's inputs, [rows] each
  int* positions;
  int* slots;
  int* prefix_lens;
  int* ready_lens;
  unsigned* counters;  // [rows, 3]
  const int* seq_rows;
  const int* table;
  int64 table_width;
  int rows;
};

// One thread per row: the drawn token becomes the next pass's row, its slot being the table's next.
extern "C" __global__ void __launch_bounds__(256) advance_rows(const AdvanceArgs a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.x * 256 + threadIdx.x;
  if (row >= a.rows || a.drawn[row] < 0) return;
  const int position = ++a.positions[row];
  a.token_ids[row] = a.drawn[row];
  a.slots[row] = a.table[a.seq_rows[row] * a.table_width + position];
  a.prefix_lens[row] = position + 1;
  a.ready_lens[row] = position;
  ++a.counters[row * 3];
}

struct NoiseArgs {
  float* out;
  unsigned first;
  unsigned count;
};

// The noise of words first .. first + count - 1: for the test that covers all of them.
extern "C" __global__ void __launch_bounds__(256) noise_of_words(const NoiseArgs a) {
  wait_for_previous();
  for (unsigned i = blockIdx.x * 256 + threadIdx.x; i < a.count; i += gridDim.x * 256) a.out[i] = gumbel_f32(a.first + i);
}
