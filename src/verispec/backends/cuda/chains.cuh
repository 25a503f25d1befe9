// What kernels of drafted rounds share: the members of a burst, the pass that drafts now, and rows of nodes. A member is a
// sequence of the burst; in a pass that verifies it has a row for its last token and one for each token it may draft, padding
// where it drafted fewer. Arrays by such rows are cut alike: what belongs to the draft's first token stands one behind the
// member's own. Nodes of a tree have places, level by level (backends/protocol.py).
#pragma once
#include "noise.cuh"
#include "steps.cuh"

struct ChainArgs {
  Args step;
  int* drafts;   // [rows that verify]
  int* parents;  // the same, of trees: places
  int* grows;    // the same: whether the node may have children
  double* phi;   // the same, of beams: the path's log-probability
  double* log_tau;  // and the logarithm of its race time
  double* race;  // [rows that draft, k]: of all children that are offered
  int* counts;   // [members]: tokens of the chain drafted in this round
  int* live;     // [members]: whether the draft goes on
  int* most;     // [members]: how much of the draft probabilities accept, where they judge
  int* share_rows;  // [head_rows]: which of the rows that verify has this row's distribution, -1: it is not wanted
  const int* offered;  // [3, head_rows, k]: children, log p + noise, log p
};

// What the host says of the members; `rounds` are further ones, `first` is a member's first draw of the pass itself, `base` its
// first row of a further one. A token below 0 is one that the host does not know.
struct Members {
  const int *seq_rows, *rounds, *tokens, *positions, *lengths, *first, *base, *is_tree, *looks_up, *by_probability;
  int count;
  __device__ explicit Members(const int* sent) : count(sent[kChains]) {
    const int* column = sent + sent[kChainsAt];
    seq_rows = column, rounds = column + count, tokens = column + 2 * count, positions = column + 3 * count;
    lengths = column + 4 * count, first = column + 5 * count, base = column + 6 * count, is_tree = column + 7 * count;
    looks_up = column + 8 * count, by_probability = column + 9 * count;
  }
};

// The pass that drafts now: token number `token` of the chains of `count` members, or that level of their trees: `k` children of
// each of `width` nodes from place `before` on, of which `keep` get the places from `place` on. How many rows each sequence has
// the sizes of the pass say, which are there even if nothing was sent.
struct DraftPass {
  int token, count, k, width, before, place, keep, is_beam, by_probability;
  float least_logprob;
  const int* members;
  __device__ explicit DraftPass(const int* sent)
      : token(0), count(0), k(0), width(1), before(0), place(0), keep(0), is_beam(0), by_probability(0), least_logprob(0.0f), members(sent) {
    const int passes = sent[kPasses], *pass = sent + sent[kPassesAt] + sent[kPass];
    if (sent[kPass] >= passes) return;  // nothing was sent: the run before a capture
    token = pass[0], least_logprob = __int_as_float(pass[passes]);
    count = pass[2 * passes], members = sent + sent[kDraftersAt] + pass[3 * passes];
    k = pass[4 * passes], width = pass[5 * passes], before = pass[6 * passes], place = pass[7 * passes];
    keep = pass[8 * passes], is_beam = pass[9 * passes], by_probability = pass[10 * passes];
  }
};

// How many tokens, or levels, a member may draft: its last draw must still fit.
__device__ __forceinline__ int most_drafted(const int* record, int length) { return min(length, record[kLimit] - record[kLength] - 1); }

// How many of a member's first places are nodes; places may be left free.
__device__ __forceinline__ int nodes_before(const ChainArgs& c, const Members& m, int s, int places) {
  int found = 0;
  for (int n = 0; n < places; ++n) found += c.drafts[m.base[s] + 1 + n] >= 0;
  return found;
}
__device__ __forceinline__ int num_nodes(const ChainArgs& c, const Members& m, int s) {
  return m.is_tree[s] ? nodes_before(c, m, s, m.lengths[s]) : c.counts[s];
}

// Row i of a pass that drafts: its children have the target's noise, or where probabilities judge that of the node, -1 for the
// root, in this round; then its distribution is kept where row `kept` of those that verify has its own.
__device__ __forceinline__ void set_offer(const ChainArgs& c, const DraftPass& pass, int i, int row, bool drafts, int node, int kept) {
  const Args& a = c.step;
  const bool weighed = drafts && pass.by_probability;
  const int length = record_of(a, a.seq_rows[row])[kLength];
  set_draw(a, i, row, a.seq_rows[row], weighed ? length : -1, weighed ? stream_of(kDraftNoise, 1 + node) : 0, 0);
  c.share_rows[i] = weighed ? kept : -1;
}

__device__ __forceinline__ void set_table_row(const Args& a, int row, int token, int position, int seq_row, int ready_len) {
  set_row(a, row, token, position, a.table[seq_row * a.table_width + position], seq_row, position + 1, ready_len);
}

// The row of a node of a sequence of `length` tokens: its context is the table, then the slots of its path.
__device__ __forceinline__ void set_node(const ChainArgs& c, const Members& m, int s, int row, int place, int length, int ready_len) {
  const Args& a = c.step;
  const int *parents = c.parents + m.base[s] + 1, *slots = a.table + m.seq_rows[s] * a.table_width + length;
  int depth = 0;
  for (int p = place; p >= 0; p = parents[p]) ++depth;
  int* tail = a.tails + static_cast<int64>(row) * a.tail_width + depth;
  for (int p = place; p >= 0; p = parents[p]) *--tail = slots[p];
  set_row(a, row, c.drafts[m.base[s] + 1 + place], length - 1 + depth, slots[place], m.seq_rows[s], length, ready_len < 0 ? length - 1 + depth : ready_len);
}
