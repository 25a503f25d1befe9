// The draw on the device, with the bits of verispec/sampling: argmax of z + noise with the smallest id on a tie, filters
// without sorting (filter.cu), and log-probabilities from integer sums.
#include "draw.cuh"

// grid (chunks, rows): the largest logit of each chunk.
extern "C" __global__ void __launch_bounds__(kThreads) draw_top(const Args a) {
  release_next();
  wait_for_previous();
  if (is_idle(a.busy)) return;
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk);
  uint64 best = 0, best_raw = 0;
  for (int id = blockIdx.x * a.chunk + threadIdx.x * 4; id < end; id += kThreads * 4) {
    const Four logits(a, row, id);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      best = Max()(best, best_key(logits.processed[i], id + i));
      if (!is_raw(a)) best_raw = Max()(best_raw, best_key(logits.raw[i], id + i));
    }
  }
  best = block_reduce(best, Max());
  best_raw = is_raw(a) ? best : block_reduce(best_raw, Max());
  if (threadIdx.x > 0) return;
  a.tops[(static_cast<int64>(row) * 2) * a.chunks + blockIdx.x] = best;
  a.tops[(static_cast<int64>(row) * 2 + 1) * a.chunks + blockIdx.x] = best_raw;
}

// grid (chunks, rows): the best of z + noise among what is kept, and the sum of the raw logits' weights.
extern "C" __global__ void __launch_bounds__(kThreads) draw_best(const Args a) {
  release_next();
  wait_for_previous();
  if (is_idle(a.busy)) return;
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk);
  const uint64* tops = a.tops + static_cast<int64>(row) * 2 * a.chunks;
  const uint64 top_key = best_of_chunks(tops, a.chunks), raw_key = best_of_chunks(tops + a.chunks, a.chunks);
  const float top = value_of(static_cast<unsigned>(top_key >> 32)), raw_top = value_of(static_cast<unsigned>(raw_key >> 32));
  const float temperature = a.temperature[row];
  const bool draws = temperature > 0.0f && usable(top_key), sums = usable(raw_key);
  const uint64 kept = a.kept[row];
  const unsigned *counter = a.counters + row * 3, *seed = a.seeds + row * 2;
  uint64 best = temperature > 0.0f ? 0 : top_key;
  // The largest logit has z = 0 and passes every filter: nothing below its noise can win.
  const int top_id = static_cast<int>(0xffffffffu - static_cast<unsigned>(top_key));
  const float bound = draws ? gumbel_f32(word_of(philox(top_id >> 2, counter[0], counter[1], counter[2], seed[0], seed[1]), top_id & 3)) : 0.0f;
  int64 sum = 0;
  for (int block = (blockIdx.x * a.chunk) / 4 + threadIdx.x; block * 4 < end; block += kThreads) {
    const Four logits(a, row, block * 4);
    uint4 words = make_uint4(0, 0, 0, 0);
    if (draws) words = philox(block, counter[0], counter[1], counter[2], seed[0], seed[1]);
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const int id = block * 4 + lane;
      if (sums) sum += weight(sub(logits.raw[lane], raw_top));
      if (!draws) continue;
      const float z = scaled(logits.processed[lane], top, temperature);
      const unsigned word = word_of(words, lane);
      if (is_below(sub(z, bound), word)) continue;
      if (z > neg_inf() && rank_key(z, id) <= kept) best = Max()(best, best_key(add(z, gumbel_f32(word)), id));
    }
  }
  best = block_reduce(best, Max());
  sum = block_reduce(sum, Sum());
  if (threadIdx.x > 0) return;
  a.best[static_cast<int64>(row) * a.chunks + blockIdx.x] = usable(top_key) ? best : kNaNKey;
  a.sums[static_cast<int64>(row) * a.chunks + blockIdx.x] = sum;
}

// Whether an id can be a child of its row. At T = 0 there are no filters.
__device__ __forceinline__ bool can_be_child(float z, int id, uint64 top_key, uint64 kept) {
  return usable(top_key) && z > neg_inf() && rank_key(z, id) <= kept;
}

// grid (chunks, rows): the best children of each chunk, best first, 0 where there are no more; and the sum of weights of all that
// can be one. By score and then by id from above; at T = 0 the score is the logit.
extern "C" __global__ void __launch_bounds__(kThreads) draw_children(const Args a) {
  release_next();
  wait_for_previous();
  if (is_idle(a.busy)) return;
  const int row = blockIdx.y, first = blockIdx.x * a.chunk, end = min(a.vocab, first + a.chunk);
  const uint64 top_key = best_of_chunks(a.tops + static_cast<int64>(row) * 2 * a.chunks, a.chunks);
  const float top = value_of(static_cast<unsigned>(top_key >> 32)), temperature = a.temperature[row];
  const bool noisy = temperature > 0.0f;
  const uint64 kept = noisy ? a.kept[row] : kNaNKey;
  const unsigned *counter = a.counters + row * 3, *seed = a.seeds + row * 2;
  int64 sum = 0;
  uint64 keys[kChildrenChunk / kThreads];
#pragma unroll
  for (int i = 0; i < kChildrenChunk / kThreads; ++i) {
    const int lane = i % 4, id = first + (i / 4 * kThreads + threadIdx.x) * 4 + lane;
    const uint4 words = noisy ? philox(id >> 2, counter[0], counter[1], counter[2], seed[0], seed[1]) : make_uint4(0, 0, 0, 0);
    keys[i] = 0;
    if (id >= end) continue;
    const float value = processed(a, row, id), z = scaled(value, top, noisy ? temperature : 1.0f);
    if (!can_be_child(z, id, top_key, kept)) continue;
    sum += weight(z);
    keys[i] = best_key(noisy ? add(z, gumbel_f32(word_of(words, lane))) : value, id);
  }
  sum = block_reduce(sum, Sum());
  if (threadIdx.x == 0) a.sums[static_cast<int64>(row) * a.chunks + blockIdx.x] = sum;
  uint64 last = kNaNKey;
  for (int rank = 0; rank < a.per_chunk; ++rank) {
    uint64 best = 0;
#pragma unroll
    for (int i = 0; i < kChildrenChunk / kThreads; ++i)
      if (keys[i] < last) best = Max()(best, keys[i]);
    last = block_reduce(best, Max());
    if (threadIdx.x == 0) a.keys[(static_cast<int64>(row) * a.chunks + blockIdx.x) * a.per_chunk + rank] = last;
  }
}

// grid (rows), behind draw_children: the k best of a row with log p + noise and log p; -1 and -inf where there are fewer.
extern "C" __global__ void __launch_bounds__(kThreads) draw_offered(const Args a) {
  release_next();
  wait_for_previous();
  if (is_idle(a.busy)) return;
  const int row = blockIdx.x, count = a.chunks * a.per_chunk;
  const uint64 *keys = a.keys + static_cast<int64>(row) * count;
  const uint64 top_key = best_of_chunks(a.tops + static_cast<int64>(row) * 2 * a.chunks, a.chunks);
  const float top = value_of(static_cast<unsigned>(top_key >> 32)), temperature = a.temperature[row];
  int64 sum = 0;
  for (int i = threadIdx.x; i < a.chunks; i += kThreads) sum += a.sums[static_cast<int64>(row) * a.chunks + i];
  sum = block_reduce(sum, Sum());
  const float log_total = log_f32(mul(__ll2float_rn(sum > 0 ? sum : 1), 9.094947017729282e-13f));  // 2^-40
  uint64 last = kNaNKey;
  for (int rank = 0; rank < a.k; ++rank) {
    uint64 best = 0;
    for (int i = threadIdx.x; i < count; i += kThreads)
      if (keys[i] < last) best = Max()(best, keys[i]);
    last = block_reduce(best, Max());
    if (threadIdx.x > 0) continue;
    int* child = a.offered + static_cast<int64>(row) * a.k + rank;
    const int64 step = static_cast<int64>(gridDim.x) * a.k;
    float value = neg_inf(), logprob = neg_inf();
    if (last > 0) {
      const int id = static_cast<int>(0xffffffffu - static_cast<unsigned>(last));
      const float z = scaled(processed(a, row, id), top, temperature > 0.0f ? temperature : 1.0f);
      value = sub(temperature > 0.0f ? value_of(static_cast<unsigned>(last >> 32)) : z, log_total), logprob = sub(z, log_total);
    }
    child[0] = last > 0 ? static_cast<int>(0xffffffffu - static_cast<unsigned>(last)) : -1;
    child[step] = __float_as_int(value), child[2 * step] = __float_as_int(logprob);
  }
}

// grid (chunks, rows), behind draw_children: what each id's weight is of them all; at T = 0 the best has everything. A row
// that is not usable has NaN throughout.
extern "C" __global__ void __launch_bounds__(kThreads) draw_shares(const Args a) {
  release_next();
  wait_for_previous();
  if (is_idle(a.busy)) return;
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk), to = a.share_rows ? a.share_rows[row] : row;
  if (to < 0) return;
  const uint64 top_key = best_of_chunks(a.tops + static_cast<int64>(row) * 2 * a.chunks, a.chunks);
  const float top = value_of(static_cast<unsigned>(top_key >> 32)), temperature = a.temperature[row];
  int64 sum = 0;
  for (int i = threadIdx.x; i < a.chunks; i += kThreads) sum += a.sums[static_cast<int64>(row) * a.chunks + i];
  const float total = mul(__ll2float_rn(block_reduce(sum, Sum())), 9.094947017729282e-13f);  // 2^-40
  for (int id = blockIdx.x * a.chunk + threadIdx.x; id < end; id += kThreads) {
    float share = 0.0f;
    if (temperature > 0.0f) {
      const float z = scaled(processed(a, row, id), top, temperature);
      if (can_be_child(z, id, top_key, a.kept[row])) share = div(exp_f32(z), total);
    } else if (id == static_cast<int>(0xffffffffu - static_cast<unsigned>(top_key))) {
      share = 1.0f;
    }
    a.shares[static_cast<int64>(to) * a.vocab + id] = usable(top_key) ? share : __int_as_float(0x7fc00000);
  }
}

// grid (chunks of 1024 ids, rows), behind draw_shares: what they add up to, as weighing.cu wants it.
extern "C" __global__ void __launch_bounds__(kThreads) draw_masses(const Args a) {
  __shared__ double of_warps[kThreads / 32];
  release_next();
  wait_for_previous();
  if (is_idle(a.busy)) return;
  const int to = a.share_rows[blockIdx.y], first = (blockIdx.x * kThreads + threadIdx.x) * 4;
  if (to < 0) return;
  double v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = first + i < a.vocab ? a.shares[static_cast<int64>(to) * a.vocab + first + i] : 0.0f;
  double sum = __dadd_rn(__dadd_rn(v[0], v[1]), __dadd_rn(v[2], v[3]));
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum = __dadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int width = kThreads / 64; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) of_warps[i] = __dadd_rn(of_warps[2 * i], of_warps[2 * i + 1]);
  a.masses[static_cast<int64>(to) * gridDim.x + blockIdx.x] = of_warps[0];
}

// grid (rows), 32 threads: the token and its raw log-probability.
extern "C" __global__ void __launch_bounds__(32) draw_token(const Args a) {
  release_next();
  wait_for_previous();
  if (is_idle(a.busy)) return;
  const int row = blockIdx.x;
  const uint64 best = best_of_chunks(a.best + static_cast<int64>(row) * a.chunks, a.chunks);
  const uint64 raw_key = best_of_chunks(a.tops + (static_cast<int64>(row) * 2 + 1) * a.chunks, a.chunks);
  int64 sum = 0;
  for (int i = threadIdx.x; i < a.chunks; i += 32) sum += a.sums[static_cast<int64>(row) * a.chunks + i];
  sum = block_reduce(sum, Sum());
  if (threadIdx.x > 0) return;
  const bool drawn = best != kNaNKey;
  const int id = drawn ? static_cast<int>(0xffffffffu - static_cast<unsigned>(best)) : -1;
  const float top = value_of(static_cast<unsigned>(raw_key >> 32));
  float log_total = __int_as_float(0x7fc00000), logprob = log_total;
  if (usable(raw_key)) log_total = log_f32(mul(__ll2float_rn(sum), 9.094947017729282e-13f));  // 2^-40
  if (drawn && usable(raw_key)) logprob = sub(sub(a.raw[static_cast<int64>(row) * a.vocab + id], top), log_total);
  a.token_ids[row] = id, a.logprobs[row] = logprob;
  a.totals[2 * row] = top, a.totals[2 * row + 1] = log_total;
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
