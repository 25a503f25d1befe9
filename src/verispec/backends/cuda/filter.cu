// How far the filters let the order (-z, id) run, without sorting and in two levels: all blocks count and weigh bins of z, then
// list what lies in the bins where a filter may end, and one block of each row finds the very key among those. A bin is a
// monotone function of z and sums are of integers, so the key is that of a sorted row. Where the list is too short, the row is
// searched digit by digit.
#include "draw.cuh"

constexpr int kBins = 2048, kListed = 4096, kTile = 512;
constexpr float kBinsPerUnit = 64.0f;

struct FilterArgs {
  Args draw;
  unsigned* bin_counts;  // [rows, kBins], zero between draws, as are the next three
  uint64* bin_weights;   // [rows, kBins]
  unsigned* likely;      // [rows]: ids that min-p keeps
  unsigned* num_listed;  // [rows]
  uint64* listed;        // [rows, kListed]: keys
  int* ends;             // [rows, 3]: the bin where top-k or min-p ends, or -1, and the first and last where top-p may
};

__device__ __forceinline__ int bin_of(float z) {
  return z > -(kBins - 1) / kBinsPerUnit ? static_cast<int>(mul(-z, kBinsPerUnit)) : kBins - 1;
}

// A row that is drawn from with filters, and how its logits become z.
struct Filtered {
  float top, temperature, top_p;
  bool on;
  __device__ Filtered(const Args& a, int row) : temperature(a.temperature[row]), top_p(a.top_p[row]) {
    const uint64 best = best_of_chunks(a.tops + static_cast<int64>(row) * 2 * a.chunks, a.chunks);
    top = value_of(static_cast<unsigned>(best >> 32));
    on = usable(best) && temperature > 0.0f && (top_p < 1.0f || a.top_k[row] > 0 || a.log_min_p[row] > neg_inf());
  }
  __device__ float z(const Args& a, int row, int id) const { return scaled(processed(a, row, id), top, temperature); }
};

// grid (chunks, rows): how many ids have their z in each bin, and what they weigh.
extern "C" __global__ void __launch_bounds__(kThreads) filter_bins(const FilterArgs f) {
  __shared__ unsigned counts[kBins];
  __shared__ uint64 weights[kBins];
  const Args& a = f.draw;
  for (int i = threadIdx.x; i < kBins; i += kThreads) counts[i] = 0, weights[i] = 0;
  release_next();
  wait_for_previous();
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk);
  const Filtered row_of(a, row);  // its barriers are behind the zeros
  if (!row_of.on) return;
  const float log_min_p = a.log_min_p[row];
  int64 likely = 0;
  for (int id = blockIdx.x * a.chunk + threadIdx.x; id < end; id += kThreads) {
    const float z = row_of.z(a, row, id);
    const int bin = bin_of(z);
    likely += z >= log_min_p;
    atomicAdd(&counts[bin], 1u);
    const uint64 w = row_of.top_p < 1.0f ? weight(z) : 0;
    if (w) atomicAdd(&weights[bin], w);
  }
  likely = block_reduce(likely, Sum());
  if (threadIdx.x == 0 && likely) atomicAdd(&f.likely[row], static_cast<unsigned>(likely));
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    if (counts[i]) atomicAdd(&f.bin_counts[static_cast<int64>(row) * kBins + i], counts[i]);
    if (weights[i]) atomicAdd(&f.bin_weights[static_cast<int64>(row) * kBins + i], weights[i]);
  }
}

// Counts and weights of all bins before each, and of all; by 1024 threads.
struct Before {
  int64 weights[kBins + 1];
  int counts[kBins + 1];
};
__device__ __forceinline__ void sum_up(const FilterArgs& f, int row, Before& before) {
  __shared__ int64 of_warps[2][32];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int64 at = static_cast<int64>(row) * kBins + 2 * t;
  const int64 first_count = f.bin_counts[at], first_weight = f.bin_weights[at];
  int64 count = first_count + f.bin_counts[at + 1], weight = first_weight + static_cast<int64>(f.bin_weights[at + 1]);
  const int64 own_count = count, own_weight = weight;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64 more_counts = __shfl_up_sync(0xffffffffu, count, step), more_weights = __shfl_up_sync(0xffffffffu, weight, step);
    if (lane >= step) count += more_counts, weight += more_weights;
  }
  if (lane == 31) of_warps[0][warp] = count, of_warps[1][warp] = weight;
  __syncthreads();
  for (int i = 0; i < warp; ++i) count += of_warps[0][i], weight += of_warps[1][i];
  before.counts[2 * t] = static_cast<int>(count - own_count), before.weights[2 * t] = weight - own_weight;
  before.counts[2 * t + 1] = static_cast<int>(count - own_count + first_count);
  before.weights[2 * t + 1] = weight - own_weight + first_weight;
  if (t == 1023) before.counts[kBins] = static_cast<int>(count), before.weights[kBins] = weight;
  __syncthreads();
}

// How many of the order min-p and top-k keep.
__device__ __forceinline__ int kept_count(const FilterArgs& f, int row) {
  const Args& a = f.draw;
  int keep = a.log_min_p[row] > neg_inf() ? static_cast<int>(f.likely[row]) : a.vocab;
  if (a.top_k[row] > 0 && a.top_k[row] < keep) keep = a.top_k[row];
  return keep > 1 ? keep : 1;
}

__device__ __forceinline__ int64 nucleus(float top_p, int64 sum) {
  const int64 needed = static_cast<int64>(ceil(__dmul_rn(static_cast<double>(top_p), __ll2double_rn(sum))));
  return needed > 1 ? needed : 1;
}

// grid (rows), 1024 threads: in which bins the filters may end. What top-p needs depends on where top-k ends in its bin.
extern "C" __global__ void __launch_bounds__(1024) filter_ends(const FilterArgs f) {
  __shared__ Before before;
  __shared__ int ends[3];
  release_next();
  wait_for_previous();
  const Args& a = f.draw;
  const int row = blockIdx.x;
  const Filtered row_of(a, row);
  if (threadIdx.x == 0) ends[0] = -1, ends[1] = kBins, ends[2] = -1;
  __syncthreads();
  if (row_of.on) {
    sum_up(f, row, before);
    const int keep = kept_count(f, row);
    for (int i = threadIdx.x; i < kBins; i += 1024)
      if (keep < a.vocab && before.counts[i] < keep && keep <= before.counts[i + 1]) ends[0] = i;
    __syncthreads();
    if (row_of.top_p < 1.0f) {
      const int bin = ends[0];
      const int64 least = nucleus(row_of.top_p, before.weights[bin < 0 ? kBins : bin]);
      const int64 most = nucleus(row_of.top_p, before.weights[bin < 0 ? kBins : bin + 1]);
      for (int i = threadIdx.x; i < kBins; i += 1024) {
        if (before.weights[i] < least && least <= before.weights[i + 1]) ends[1] = i;
        if (before.weights[i] < most && most <= before.weights[i + 1]) ends[2] = i;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < 3) f.ends[row * 3 + threadIdx.x] = ends[threadIdx.x];
}

// grid (chunks, rows): the keys in those bins, in any order.
extern "C" __global__ void __launch_bounds__(kThreads) filter_list(const FilterArgs f) {
  release_next();
  wait_for_previous();
  const Args& a = f.draw;
  const int row = blockIdx.y, end = min(a.vocab, (blockIdx.x + 1) * a.chunk);
  const Filtered row_of(a, row);
  const int bin_k = f.ends[row * 3], first = f.ends[row * 3 + 1], last = f.ends[row * 3 + 2];
  if (!row_of.on || (bin_k < 0 && last < 0)) return;
  for (int id = blockIdx.x * a.chunk + threadIdx.x; id < end; id += kThreads) {
    const float z = row_of.z(a, row, id);
    const int bin = bin_of(z);
    if (bin != bin_k && (bin < first || bin > last)) continue;
    const unsigned at = atomicAdd(&f.num_listed[row], 1u);
    if (at < kListed) f.listed[static_cast<int64>(row) * kListed + at] = rank_key(z, id);
  }
}

__device__ __forceinline__ float z_of(uint64 key) { return value_of(~static_cast<unsigned>(key >> 32)); }

// The last kept key, from the list: each thread places four of its keys among all of their bins.
__device__ uint64 kept_of_list(const FilterArgs& f, int row, int keep, float top_p, int count, Before& before) {
  __shared__ uint64 tile[kTile];
  __shared__ int64 tile_weights[kTile], sum;
  __shared__ uint64 last_kept, last_nucleus;
  const int vocab = f.draw.vocab;
  sum_up(f, row, before);
  if (threadIdx.x == 0) last_kept = last_nucleus = kNaNKey, sum = before.weights[kBins];
  uint64 keys[kListed / 1024];
  int64 lighter[kListed / 1024];  // weights and counts before the keys
  int ranks[kListed / 1024], bins[kListed / 1024];
  for (int n = 0; n < kListed / 1024; ++n) {
    const int i = n * 1024 + threadIdx.x;
    keys[n] = i < count ? f.listed[static_cast<int64>(row) * kListed + i] : kNaNKey;
    bins[n] = i < count ? bin_of(z_of(keys[n])) : kBins;
    ranks[n] = before.counts[bins[n]], lighter[n] = before.weights[bins[n]];
  }
  for (int first = 0; first < count; first += kTile) {
    __syncthreads();
    const int i = first + threadIdx.x;
    if (threadIdx.x < kTile && i < count) {
      tile[threadIdx.x] = f.listed[static_cast<int64>(row) * kListed + i];
      tile_weights[threadIdx.x] = weight(z_of(tile[threadIdx.x]));
    }
    __syncthreads();
    for (int j = 0; j < min(kTile, count - first); ++j) {
      const uint64 key = tile[j];
      const int bin = bin_of(z_of(key));
#pragma unroll
      for (int n = 0; n < kListed / 1024; ++n)
        if (bin == bins[n] && key < keys[n]) ++ranks[n], lighter[n] += tile_weights[j];
    }
  }
  for (int n = 0; n < kListed / 1024; ++n)
    if (bins[n] < kBins && keep < vocab && ranks[n] + 1 == keep) last_kept = keys[n], sum = lighter[n] + weight(z_of(keys[n]));
  __syncthreads();
  if (top_p < 1.0f) {
    const int64 needed = nucleus(top_p, sum);
    for (int n = 0; n < kListed / 1024; ++n)
      if (bins[n] < kBins && lighter[n] < needed && needed <= lighter[n] + weight(z_of(keys[n]))) last_nucleus = keys[n];
    __syncthreads();
  }
  return last_nucleus < last_kept ? last_nucleus : last_kept;
}

// Which key of the order (-z, id) is the first at which the counts (or the weights) of all before it and its own reach
// `needed`: digits of 11 bits, most significant first. By one block of 1024 threads; `bins` are 2048 in shared memory.
template <bool WEIGHTS>
__device__ uint64 select_key(const Args& a, int row, const Filtered& row_of, int64 needed, int64* bins) {
  __shared__ uint64 prefix;
  __shared__ int64 before;
  if (threadIdx.x == 0) prefix = 0, before = 0;
  for (int shift = 53; shift > -11; shift -= 11) {
    const int low = max(shift, 0), digits = shift < 0 ? 11 + shift : 11;
    for (int i = threadIdx.x; i < 2048; i += 1024) bins[i] = 0;
    __syncthreads();
    const uint64 known = prefix;
    for (int id = threadIdx.x; id < a.vocab; id += 1024) {
      const float z = row_of.z(a, row, id);
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


__device__ uint64 kept_of_digits(const Args& a, int row, const Filtered& row_of, int keep, int64* bins) {
  uint64 kept = kNaNKey;
  if (keep < a.vocab) kept = select_key<false>(a, row, row_of, keep, bins);
  if (row_of.top_p < 1.0f) {
    int64 sum = 0;
    for (int id = threadIdx.x; id < a.vocab; id += 1024) {
      const float z = row_of.z(a, row, id);
      if (rank_key(z, id) <= kept) sum += weight(z);
    }
    const int64 needed = nucleus(row_of.top_p, block_reduce(sum, Sum()));
    const uint64 last = select_key<true>(a, row, row_of, needed, bins);
    kept = last < kept ? last : kept;
  }
  return kept;
}

// grid (rows), 1024 threads: the last key that is kept; and zeros for the next draw.
extern "C" __global__ void __launch_bounds__(1024) filter_kept(const FilterArgs f) {
  __shared__ Before before;
  release_next();
  wait_for_previous();
  const Args& a = f.draw;
  const int row = blockIdx.x, keep = kept_count(f, row), count = static_cast<int>(f.num_listed[row]);
  const Filtered row_of(a, row);
  uint64 kept = kNaNKey;
  if (row_of.on && count > 0)
    kept = count <= kListed ? kept_of_list(f, row, keep, row_of.top_p, count, before)
                            : kept_of_digits(a, row, row_of, keep, before.weights);
  __syncthreads();
  if (threadIdx.x == 0) a.kept[row] = kept, f.likely[row] = f.num_listed[row] = 0;
  for (int i = threadIdx.x; i < kBins; i += 1024)
    f.bin_counts[static_cast<int64>(row) * kBins + i] = 0, f.bin_weights[static_cast<int64>(row) * kBins + i] = 0;
}
