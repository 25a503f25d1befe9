// Levels of draft trees, without the host: nodes become rows, and the children that the pass offers become nodes. Every kernel
// is one block. What a beam keeps is decided as sampling/beam.py does it, in float64 with the device's own functions: where two
// paths are equally good but for the last bit, another may stay, which no token shows.
#include "chains.cuh"

// Of the second level on; chains.cu's begin_draft has the root's row.
extern "C" __global__ void __launch_bounds__(kThreads) begin_level(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const Members m(a.sent);
  const DraftPass pass(a.sent);
  bool has_rows = false;
  for (int i = threadIdx.x; i < a.head_rows; i += kThreads) {
    const bool is_member = i < pass.count * pass.width;
    const int s = is_member ? pass.members[i / pass.width] : 0, place = pass.before + i % pass.width;
    const bool drafts = is_member && c.live[s] && c.drafts[m.base[s] + 1 + place] >= 0 && c.grows[m.base[s] + 1 + place];
    if (drafts) set_node(c, m, s, i, place, record_of(a, m.seq_rows[s])[kLength], -1);
    else set_padding(a, i);
    set_offer(c, pass, i, i, drafts, drafts ? nodes_before(c, m, s, place) : 0, drafts ? m.base[s] + 1 + place : 0);
    has_rows |= drafts;
  }
  set_busy(a, has_rows);
}

constexpr double kNever = 1e300;  // later than any time of a race, which is a logarithm
enum Ranking { kGreedy, kRace, kLikely };  // sampling/beam.py's

// A node whose children are offered at row `row` of the pass; the root has no place.
struct Parent {
  int place;
  bool grows;
  double phi, log_tau;
  __device__ Parent(const ChainArgs& c, const Members& m, const DraftPass& pass, int row) {
    const int s = pass.members[row / pass.width], at = m.base[s] + 1 + pass.before + row % pass.width;
    const bool is_root = pass.token == 0;
    place = is_root ? -1 : pass.before + row % pass.width;
    grows = c.live[s] && !is_broken(c.step, c.step.row_ids[row]) && (is_root || (c.drafts[at] >= 0 && c.grows[at]));
    phi = is_root || !grows ? 0.0 : c.phi[at], log_tau = is_root || !grows ? 0.0 : c.log_tau[at];
  }
};

__device__ __forceinline__ double log_of_sum(double x, double y) {  // of exp(x) and exp(y)
  return x > y ? x + log1p(exp(y - x)) : y + log1p(exp(x - y));
}

// By what a child is ranked, the least first: `first` is log p + noise of its best sibling, `value` its own; `log_of_all` the logarithm
// of what all siblings' exp(value - first) add up to. At T = 0 the likeliest is first.
__device__ __forceinline__ double time_of(const Parent& parent, float first, float value, float logprob, double log_of_all, Ranking by) {
  if (by == kGreedy) return -(parent.phi + logprob);
  const double gap = static_cast<double>(first) - value;
  if (by == kLikely) return parent.log_tau + (gap + log_of_all);
  return log_of_sum(parent.log_tau, log(-expm1(-gap)) - (parent.phi + value));
}

// The child of rank `rank` of a row becomes a node.
__device__ __forceinline__ bool hang(const ChainArgs& c, const Members& m, const DraftPass& pass, int row, int rank, int place, double time) {
  const int s = pass.members[row / pass.width], at = m.base[s] + 1 + place, child = row * pass.k + rank;
  const int *record = record_of(c.step, m.seq_rows[s]), token = c.offered[child];
  const Parent parent(c, m, pass, row);
  c.drafts[at] = token, c.parents[at] = parent.place;
  c.grows[at] = goes_on(record, token, record[kLength] + 1 + pass.token) && pass.token + 1 < most_drafted(record, m.lengths[s]);
  c.phi[at] = parent.phi + __int_as_float(c.offered[2 * c.step.head_rows * pass.k + child]), c.log_tau[at] = time;
  return c.grows[at];
}

extern "C" __global__ void __launch_bounds__(kThreads) end_level(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const Members m(a.sent);
  const DraftPass pass(a.sent);
  note_broken(a);
  const int k = pass.k, step = a.head_rows * k, each = pass.width * k;
  for (int row = threadIdx.x; pass.is_beam && row < pass.count * pass.width; row += kThreads) {
    const Parent parent(c, m, pass, row);
    const bool greedy = __int_as_float(record_of(a, m.seq_rows[pass.members[row / pass.width]])[kTemperature]) == 0.0f;
    const Ranking by = greedy ? kGreedy : pass.by_probability ? kRace : kLikely;
    const float* value = reinterpret_cast<const float*>(c.offered) + step + row * k;
    double before = -kNever, all = 0.0;  // no child overtakes a sibling
    for (int rank = 0; by == kLikely && rank < k; ++rank)
      if (c.offered[row * k + rank] >= 0) all += exp(static_cast<double>(value[rank]) - value[0]);
    const double log_of_all = log(all);
    for (int rank = 0; rank < k; ++rank) {
      const bool exists = parent.grows && c.offered[row * k + rank] >= 0;
      if (exists) before = fmax(before, time_of(parent, value[0], value[rank], value[step + rank], log_of_all, by));
      c.race[row * k + rank] = exists ? before : kNever;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < pass.count; i += kThreads) {
    const int s = pass.members[i];
    bool goes = false;
    double last = -kNever;
    for (int rank = 0, last_at = -1; pass.is_beam && rank < pass.keep; ++rank) {
      int at = -1;
      double best = kNever;
      for (int j = 0; j < each; ++j) {
        const double time = c.race[i * each + j];
        if ((time > last || (time == last && j > last_at)) && time < best) best = time, at = j;
      }
      if (at < 0) break;
      goes |= hang(c, m, pass, i * pass.width + at / k, at % k, pass.place + rank, best);
      last = best, last_at = at;
    }
    for (int j = 0; !pass.is_beam && j < each; ++j) {
      const int row = i * pass.width + j / k;
      if (c.offered[row * k + j % k] >= 0 && Parent(c, m, pass, row).grows) goes |= hang(c, m, pass, row, j % k, pass.place + j, 0.0);
    }
    c.live[s] = c.live[s] && goes;
  }
  if (threadIdx.x == 0) ++a.sent[kPass];
}
