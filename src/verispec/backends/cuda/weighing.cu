// Drafts that probabilities judge: recursive rejection sampling as verispec/sampling/recursive.py defines it, bit for bit, a block
// for each member. What is committed takes the place of the target's draws along the path; the kernels behind this one then judge
// as always, but accept no more than was accepted here. Sums over the vocabulary are trees of neighbours: a warp adds 1024 ids,
// the block what the warps have found. What rejections leave of q and p is not kept: it follows from the factors wherever an id
// is looked at.
#include "chains.cuh"

constexpr int kWeighThreads = 512, kLeaves = 1024, kMostTried = 256;
constexpr double kNothing = 0x1p-1000;  // a mass that is not above it is none

struct WeighArgs {
  ChainArgs chains;
  const float* target;          // [rows that verify, vocab]: probabilities behind each
  const float* proposal;        // the same: what children were drawn from
  const double* target_sums;    // [rows that verify, chunks of 1024 ids]
  const double* proposal_sums;  // the same
  double* left_sums;            // [members, 3, chunks]: of what a rejection left, of q in two places by turns, and of p
  const float* logits;          // [head_rows, vocab], raw
  const float* totals;          // [head_rows, 2]: the largest of them, and the logarithm of their sum
  int* drawn;                   // [head_rows]
  float* logprobs;              // [head_rows]
  int vocab;
  int chunks;  // at most 1024
};

// What the rejections so far have left at a node: after k of them, the factors k make probabilities of what there is.
struct Left {
  double q_factors[kMostTried + 1], p_factors[kMostTried + 1];
  int tokens[kMostTried], is_empty[kMostTried];  // the residual: q stayed as it was
  int count;
};

struct Pair {
  double q, p;
};

// q and p of an id, without their last factors.
__device__ __forceinline__ Pair left_at(const Left& left, const float* q_row, const float* p_row, int id) {
  Pair v{static_cast<double>(q_row[id]), static_cast<double>(p_row[id])};
  for (int k = 0; k < left.count; ++k) {
    if (!left.is_empty[k]) v.q = fmax(__dsub_rn(__dmul_rn(v.q, left.q_factors[k]), __dmul_rn(v.p, left.p_factors[k])), 0.0);
    if (id == left.tokens[k]) v.p = 0.0;
  }
  return v;
}

__device__ __forceinline__ double warp_sum(double v) {  // neighbours first; every lane gets it
#pragma unroll
  for (int step = 1; step < 32; step *= 2) v = __dadd_rn(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

template <int COUNT>
__device__ __forceinline__ double tree_of(double* v) {
#pragma unroll
  for (int width = COUNT / 2; width > 0; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] = __dadd_rn(v[2 * i], v[2 * i + 1]);
  return v[0];
}

// Sums of what is left if `token` is rejected, too, chunk by chunk.
__device__ __forceinline__ void sum_left(const WeighArgs& w, const Left& left, const float* q_row, const float* p_row, int token, double* q_sums, double* p_sums) {
  const int lane = threadIdx.x % 32, k = left.count;
  for (int chunk = threadIdx.x / 32; chunk < w.chunks; chunk += kWeighThreads / 32) {
    double q_parts[8], p_parts[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      double q[4], p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int id = chunk * kLeaves + j * 128 + lane * 4 + i;
        q[i] = p[i] = 0.0;
        if (id >= w.vocab) continue;
        const Pair v = left_at(left, q_row, p_row, id);
        q[i] = fmax(__dsub_rn(__dmul_rn(v.q, left.q_factors[k]), __dmul_rn(v.p, left.p_factors[k])), 0.0);
        p[i] = id == token ? 0.0 : v.p;
      }
      q_parts[j] = warp_sum(tree_of<4>(q)), p_parts[j] = warp_sum(tree_of<4>(p));
    }
    if (lane == 0) q_sums[chunk] = tree_of<8>(q_parts), p_sums[chunk] = tree_of<8>(p_parts);
  }
}

// The tree over 1024 leaves, by the block: node 1 is the root, whose value is returned, leaf i node 1024 + i.
template <typename F>
__device__ __forceinline__ double grow_tree(double* nodes, const F& leaf) {
  __syncthreads();
  for (int i = threadIdx.x; i < kLeaves; i += kWeighThreads) nodes[kLeaves + i] = leaf(i);
  for (int width = kLeaves / 2; width > 0; width /= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += kWeighThreads) nodes[width + i] = __dadd_rn(nodes[2 * (width + i)], nodes[2 * (width + i) + 1]);
  }
  __syncthreads();
  return nodes[1];
}

// The leaf that `rest` of the tree's mass lies in; what is left of it there. Nobody goes where there is no mass.
__device__ __forceinline__ int descend(const double* nodes, double& rest) {
  int at = 1;
  while (at < kLeaves) {
    const double before = nodes[2 * at], behind = nodes[2 * at + 1];
    const bool goes_right = behind > 0.0 && rest >= before;
    if (goes_right) rest = __dsub_rn(rest, before);
    at = 2 * at + goes_right;
  }
  return at - kLeaves;
}

// Strictly between 0 and 1, of 52 bits: words 0 and 1 of one stream.
__device__ __forceinline__ double uniform(const int* record, int stream) {
  const uint4 words = philox(0, record[kLength], record[kSample], stream, record[kSeedLow], record[kSeedHigh]);
  const int64 bits = (static_cast<int64>(words.x) << 20) + (words.y >> 12);
  return __dmul_rn(__dadd_rn(__ll2double_rn(bits), 0.5), 0x1p-52);
}

__device__ __forceinline__ bool is_mass(double v) { return v > kNothing && v <= 1.7976931348623157e308; }

// `first` is the member's first row of the head. Whoever drafted nothing keeps the target's draw.
__device__ __forceinline__ void weigh(const WeighArgs& w, const Members& m, int s, int first) {
  __shared__ double nodes[2 * kLeaves];
  __shared__ Left left;
  const ChainArgs& c = w.chains;
  const int base = m.base[s], *drafts = c.drafts + base + 1, *record = record_of(c.step, m.seq_rows[s]);
  const int places = m.is_tree[s] ? m.lengths[s] : c.counts[s];
  int node = -1, place = -1, accepted = 0;
  while (num_nodes(c, m, s) > 0) {
    const int64 row = base + 1 + place;
    const float *q_row = w.target + row * w.vocab, *p_row = w.proposal + row * w.vocab;
    const double *q_sums = w.target_sums + row * w.chunks, *p_sums = w.proposal_sums + row * w.chunks;
    double* left_sums = w.left_sums + static_cast<int64>(s) * 3 * w.chunks;
    const auto sum_at = [&](const double* sums) {
      return grow_tree(nodes, [&](int i) { return i < w.chunks ? sums[i] : 0.0; });
    };
    const double q_mass = sum_at(q_sums);
    const bool is_usable = is_mass(q_mass);
    bool is_known = false;  // p
    int token = -1, child = -1, child_node = -1;
    if (threadIdx.x == 0) left.count = 0, left.q_factors[0] = __drcp_rn(q_mass);
    for (int n = 0, next = 0; is_usable && child < 0 && n < places; ++n) {
      if (drafts[n] < 0) continue;
      const int number = next++;
      if ((m.is_tree[s] ? c.parents[base + 1 + n] : n - 1) != place) continue;
      if (!is_known) {
        const double p_mass = sum_at(p_sums);
        if (!is_mass(p_mass)) break;
        if (threadIdx.x == 0) left.p_factors[0] = __drcp_rn(p_mass);
        is_known = true;
      }
      __syncthreads();
      const int x = drafts[n], k = left.count;
      const Pair v = left_at(left, q_row, p_row, x);
      const double q_x = __dmul_rn(v.q, left.q_factors[k]), p_x = __dmul_rn(v.p, left.p_factors[k]);
      if (!(p_x > 0.0)) continue;
      if (__dmul_rn(uniform(record, stream_of(kCoin, number)), p_x) < q_x) {
        token = x, child = n, child_node = number;
        continue;
      }
      double* sums = left_sums + (q_sums == left_sums ? w.chunks : 0);
      sum_left(w, left, q_row, p_row, x, sums, left_sums + 2 * w.chunks);
      const double q_left = sum_at(sums), p_left = sum_at(left_sums + 2 * w.chunks);
      if (q_left > kNothing) q_sums = sums;
      if (threadIdx.x == 0) {
        left.tokens[k] = x, left.is_empty[k] = !(q_left > kNothing), left.count = k + 1;
        left.q_factors[k + 1] = q_left > kNothing ? __drcp_rn(q_left) : left.q_factors[k];
        left.p_factors[k + 1] = __drcp_rn(p_left > kNothing ? p_left : 1.0);
      }
      __syncthreads();
    }
    if (is_usable && child < 0) {
      const double whole = sum_at(q_sums);
      double rest = __dmul_rn(uniform(record, stream_of(kResidual, 1 + node)), whole);
      const int first_id = kLeaves * descend(nodes, rest);
      grow_tree(nodes, [&](int i) { return first_id + i < w.vocab ? left_at(left, q_row, p_row, first_id + i).q : 0.0; });
      token = first_id + descend(nodes, rest);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int head = first + 1 + place;
      w.drawn[head] = token;
      w.logprobs[head] = token < 0 ? __int_as_float(0x7fc00000)
                                   : sub(sub(w.logits[static_cast<int64>(head) * w.vocab + token], w.totals[2 * head]), w.totals[2 * head + 1]);
    }
    if (child < 0) break;
    place = child, node = child_node, ++accepted;
  }
  if (threadIdx.x == 0) c.most[s] = accepted;
}

extern "C" __global__ void __launch_bounds__(kWeighThreads) weigh_first(const WeighArgs w) {
  wait_for_previous();
  const Members m(w.chains.step.sent);
  const int s = blockIdx.x;
  if (s < m.count && m.by_probability[s]) weigh(w, m, s, m.first[s]);
}

extern "C" __global__ void __launch_bounds__(kWeighThreads) weigh_further(const WeighArgs w) {
  wait_for_previous();
  const Members m(w.chains.step.sent);
  const int s = blockIdx.x;
  if (s < m.count && m.by_probability[s]) weigh(w, m, s, m.base[s]);
}
