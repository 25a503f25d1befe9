// Rounds that begin with a draft, without the host: a pass for each token drafted or level grown (trees.cu), one that verifies
// them all, and what the target drew itself is kept. Chains that are looked up need no pass: `look_up` stands before the pass that
// verifies them. Every other kernel is one block.
#include "chains.cuh"

// Before anything is drafted: what is new, which the pass itself then is not told again, and where the members are.
__device__ __forceinline__ void start_burst(const Args& a) {
  take_news(a);
  if (threadIdx.x == 0) a.sent[kBinds] = a.sent[kUpdates] = 0;
  const Members m(a.sent);
  for (int s = threadIdx.x; s < m.count; s += kThreads) {
    int* record = record_of(a, m.seq_rows[s]);
    if (m.tokens[s] >= 0) record[kNext] = m.tokens[s], record[kLength] = m.positions[s] + 1;
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads) begin_draft(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const int *sent = a.sent, round = sent[kRound];
  if (round == 0 && sent[kPass] == 0) start_burst(a);
  const Members m(sent);
  const DraftPass pass(sent);
  const int rows_each = a.rows / a.head_rows;
  bool has_rows = false;
  for (int i = threadIdx.x; i < a.head_rows; i += kThreads) {
    const int s = i < pass.count ? pass.members[i] : 0, seq_row = i < pass.count ? m.seq_rows[s] : 0;
    const int* record = record_of(a, seq_row);
    if (i < pass.count && pass.token == 0) {
      const bool has_places = !m.is_tree[s] || record[kLength] + m.lengths[s] <= a.table_width;
      c.counts[s] = 0;
      c.live[s] = round <= m.rounds[s] && record[kNext] >= 0 && most_drafted(record, m.lengths[s]) > 0 && has_places;
      for (int n = 1; m.is_tree[s] && n <= m.lengths[s]; ++n) c.drafts[m.base[s] + n] = -1;
    }
    const bool drafts = i < pass.count && c.live[s];
    const int row = rows_each * (i + 1) - 1, position = record[kLength] - 1 + pass.token;
    const int ready_len = position + 1 - rows_each;
    for (int each = row + 1 - rows_each; each < row; ++each)  // the token before, which a second model may lack
      if (drafts) set_table_row(a, each, a.slot_tokens[a.table[seq_row * a.table_width + position - 1]], position - 1, seq_row, ready_len);
      else set_padding(a, each);
    if (drafts) set_table_row(a, row, pass.token ? c.drafts[m.base[s] + pass.token] : record[kNext], position, seq_row, ready_len);
    else set_padding(a, row);
    set_offer(c, pass, i, row, drafts, pass.token - 1, drafts ? m.base[s] + pass.token : 0);
    has_rows |= drafts;
  }
  set_busy(a, has_rows);
}

extern "C" __global__ void __launch_bounds__(kThreads) end_draft(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const Members m(a.sent);
  const DraftPass pass(a.sent);
  note_broken(a);
  for (int i = threadIdx.x; i < pass.count; i += kThreads) {
    const int s = pass.members[i], *record = record_of(a, m.seq_rows[s]);
    if (!c.live[s]) continue;
    const int token = drawn_at(a, i, a.row_ids[i]), count = pass.token + 1;
    c.drafts[m.base[s] + count] = token;
    c.counts[s] = token >= 0 ? count : pass.token;
    c.live[s] = goes_on(record, token, record[kLength] + count) && a.logprobs[i] >= pass.least_logprob &&
                count < most_drafted(record, m.lengths[s]);
  }
  if (threadIdx.x == 0) ++a.sent[kPass];
}

// Before look_up; it matters in the first round, but behind passes that drafted for others it changes nothing.
extern "C" __global__ void __launch_bounds__(kThreads) begin_look_up(const ChainArgs c) {
  wait_for_previous();
  if (c.step.sent[kRound] == 0) start_burst(c.step);
}

// A block for each member: its chain is what followed its last 4, 3 or 2 tokens the last time they occurred before, the most of
// them that did; up to the end of what is known.
extern "C" __global__ void __launch_bounds__(kThreads) look_up(const ChainArgs c) {
  constexpr int kMost = 4, kLeast = 2, kPositionBits = 28;
  wait_for_previous();
  const Args& a = c.step;
  const Members m(a.sent);
  const int s = blockIdx.x;
  if (s >= m.count || !m.looks_up[s]) return;
  const int seq_row = m.seq_rows[s], *record = record_of(a, seq_row), *slots = a.table + seq_row * a.table_width;
  const int last = record[kLength] - 1;  // the position of the last token, which has had no row yet
  const auto token = [&](int position) { return position < last ? a.slot_tokens[slots[position]] : record[kNext]; };
  __shared__ int best, end;
  if (threadIdx.x == 0) {
    best = 0;
    end = a.sent[kRound] <= m.rounds[s] && record[kNext] >= 0 ? max(0, most_drafted(record, m.lengths[s])) : 0;
  }
  int tokens[kMost], found = 0;  // found: how many agree, then where
  for (int n = 0; n < kMost; ++n) tokens[n] = n <= last ? token(last - n) : -1;
  __syncthreads();
  for (int position = threadIdx.x; position < last; position += kThreads) {
    int n = 0;
    while (n < kMost && n <= position && token(position - n) == tokens[n]) ++n;
    if (n >= kLeast) found = max(found, n << kPositionBits | position);
  }
  if (found) atomicMax(&best, found);
  __syncthreads();
  const int first = (best & ((1 << kPositionBits) - 1)) + 1, count = best ? min(end, last + 1 - first) : 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int drafted = token(first + i);
    c.drafts[m.base[s] + 1 + i] = drafted;
    if (!goes_on(record, drafted, last + 2 + i)) atomicMin(&end, i + 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) c.counts[s] = min(count, end);
}

// Whether probabilities are wanted behind row i of those that verify: that of the last token, or of a node.
__device__ __forceinline__ bool is_weighed(const ChainArgs& c, const Members& m, int s, int i) {
  const int n = i - m.base[s], count = num_nodes(c, m, s);
  return count > 0 && (n == 0 || (m.is_tree[s] ? c.drafts[i] >= 0 : n <= count));
}

// Behind begin_round, which has made padding of the rows to be drafted: those that were.
extern "C" __global__ void __launch_bounds__(kThreads) place_drafts(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const int *sent = a.sent, *owners = sent + sent[kOwnersAt];
  const Members m(sent);
  for (int i = threadIdx.x; i < a.head_rows; i += kThreads) c.share_rows[i] = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < sent[kOwners]; i += kThreads) {
    const int s = owners[i], n = i - m.base[s], draw = m.first[s] + n;
    if (m.by_probability[s] && is_weighed(c, m, s, i)) c.share_rows[draw] = i;
    if (n == 0 || (m.is_tree[s] ? c.drafts[i] < 0 : n > c.counts[s])) continue;
    if (m.is_tree[s]) set_node(c, m, s, a.row_ids[draw], n - 1, m.positions[s] + 1, m.positions[s]);
    else set_table_row(a, a.row_ids[draw], c.drafts[i], m.positions[s] + n, m.seq_rows[s], m.positions[s]);
    set_draw(a, draw, a.row_ids[draw], m.seq_rows[s], -1, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) begin_verify(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const int *sent = a.sent, *owners = sent + sent[kOwnersAt], round = sent[kRound];
  const Members m(sent);
  bool has_rows = false;
  for (int i = threadIdx.x; i < a.rows; i += kThreads) {
    const int s = i < sent[kOwners] ? owners[i] : 0, seq_row = i < sent[kOwners] ? m.seq_rows[s] : 0;
    const int *record = record_of(a, seq_row), n = seq_row ? i - m.base[s] : 0, position = record[kLength] - 1;
    const bool goes = seq_row && round <= m.rounds[s] && record[kNext] >= 0;
    if (goes && n && m.is_tree[s] && c.drafts[i] >= 0) set_node(c, m, s, i, n - 1, record[kLength], position);
    else if (goes && (n == 0 || n <= c.counts[s])) set_table_row(a, i, n ? c.drafts[i] : record[kNext], position + n, seq_row, position);
    else set_padding(a, i);
    set_draw(a, i, i, a.seq_rows[i], -1, 0, 0);
    c.share_rows[i] = goes && m.by_probability[s] && is_weighed(c, m, s, i) ? i : -1;
    has_rows |= goes;
  }
  set_busy(a, has_rows);
}

// How much of a draft may be accepted.
__device__ __forceinline__ int most_accepted(const ChainArgs& c, const Members& m, int s) {
  return m.by_probability[s] ? c.most[s] : m.lengths[s];
}

// Accept what was drafted as far as it was drawn, and go on behind it. `tokens` are the member's draws.
__device__ __forceinline__ void judge_chain(const ChainArgs& c, const Members& m, int s, int row, const int* tokens, int* out) {
  const Args& a = c.step;
  const int length = a.positions[row] + 1, base = m.base[s], drafted = m.lengths[s] ? c.counts[s] : 0;
  const bool idles = a.slots[row] == kDumpSlot;
  const int most = min(drafted, most_accepted(c, m, s));
  int accepted = 0;
  while (accepted < most && c.drafts[base + 1 + accepted] == tokens[accepted]) ++accepted;
  int *record = record_of(a, m.seq_rows[s]), *shown = out + a.sent[kExtraAt] + base;
  for (int n = 1; n <= m.lengths[s]; ++n) shown[n] = n <= drafted ? c.drafts[base + n] : -1;
  out[a.sent[kExtraAt] + a.sent[kOwners] + s] = idles ? -1 : accepted;
  if (idles) return;
  bool ended = false;
  for (int n = 0; n <= accepted; ++n) ended |= !goes_on(record, tokens[n], length + 1 + n);
  record[kNext] = ended ? -1 : tokens[accepted], record[kLength] = length + 1 + accepted;
}

// The same of a tree: down from the root as long as a child was drawn. Slots of the path change places with those of its
// positions, so that the table has them in the path's order.
__device__ __forceinline__ void judge_tree(const ChainArgs& c, const Members& m, int s, int row, const int* tokens, int* out) {
  const Args& a = c.step;
  const int length = a.positions[row] + 1, base = m.base[s], extra_at = a.sent[kExtraAt];
  const bool idles = a.slots[row] == kDumpSlot;
  int *record = record_of(a, m.seq_rows[s]), *slots = a.table + m.seq_rows[s] * a.table_width + length;
  const int most = most_accepted(c, m, s);
  int accepted = 0, node = -1, drawn = tokens[0];
  bool ended = !goes_on(record, drawn, length + 1);
  for (int place = 0; place < m.lengths[s]; ++place) {
    const int token = c.drafts[base + 1 + place], parent = c.parents[base + 1 + place];
    out[extra_at + base + 1 + place] = token, out[a.sent[kOutWidth] + extra_at + base + 1 + place] = parent;
    if (idles || accepted == most || token < 0 || token != drawn || parent != node) continue;
    const int slot = slots[place];
    slots[place] = slots[accepted], slots[accepted] = slot;
    node = place, drawn = tokens[1 + place], ++accepted;
    ended |= !goes_on(record, drawn, length + 1 + accepted);
  }
  out[extra_at + a.sent[kOwners] + s] = idles ? -1 : accepted;
  if (!idles) record[kNext] = ended ? -1 : drawn, record[kLength] = length + 1 + accepted;
}

__device__ __forceinline__ void judge(const ChainArgs& c, const Members& m, int s, int row, const int* tokens, int* out) {
  if (m.is_tree[s]) judge_tree(c, m, s, row, tokens, out);
  else judge_chain(c, m, s, row, tokens, out);
}

// Behind end_round, which has written the draws of the pass itself.
extern "C" __global__ void __launch_bounds__(kThreads) judge_first(const ChainArgs c) {
  wait_for_previous();
  const Members m(c.step.sent);
  for (int s = threadIdx.x; s < m.count; s += kThreads)
    judge(c, m, s, c.step.row_ids[m.first[s]], c.step.out + m.first[s], c.step.out);
  if (threadIdx.x == 0) c.step.sent[kPass] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads) end_verify(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  int* sent = a.sent;
  const Members m(sent);
  note_broken(a);
  const int round = sent[kRound], width = sent[kOutWidth];
  int* tokens = a.out + static_cast<int64>(round) * 2 * width;
  for (int i = threadIdx.x; i < sent[kOwners]; i += kThreads) {
    const bool is_padding = a.slots[i] == kDumpSlot;
    tokens[i] = is_padding ? -1 : drawn_at(a, i, i);
    tokens[width + i] = is_padding ? 0 : __float_as_int(a.logprobs[i]);
  }
  __syncthreads();
  for (int s = threadIdx.x; s < m.count; s += kThreads) judge(c, m, s, m.base[s], tokens + m.base[s], tokens);
  if (threadIdx.x == 0) sent[kRound] = round + 1, sent[kPass] = 0;
}
