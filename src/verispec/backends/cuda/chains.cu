// Rounds that begin with a drafted chain, without the host: a pass for each token drafted, one that verifies them all, and
// what the target drew itself is kept. Every kernel is one block. A member is a sequence of the burst; in a pass that
// verifies it has a row for its last token and one for each token it may draft, padding where it drafted fewer. Arrays by
// such rows are cut alike: what belongs to the draft's first token stands one behind the member's own.
#include "steps.cuh"

struct ChainArgs {
  Args step;
  int* drafts;  // [rows that verify]
  int* counts;  // [members]: tokens drafted in this round
  int* live;    // [members]: whether the draft goes on
};

// What the host says of the members; `rounds` are further ones, `first` is a member's first draw of the pass itself, `base` its
// first row of a further one. A token below 0 is one that the host does not know.
struct Members {
  const int *seq_rows, *rounds, *tokens, *positions, *lengths, *first, *base;
  int count;
  __device__ explicit Members(const int* sent) : count(sent[kChains]) {
    const int* column = sent + sent[kChainsAt];
    seq_rows = column, rounds = column + count, tokens = column + 2 * count, positions = column + 3 * count;
    lengths = column + 4 * count, first = column + 5 * count, base = column + 6 * count;
  }
};

// The pass that drafts now: token number `token` of the chains of `count` members.
struct DraftPass {
  int token, rows_each, count;
  float least_logprob;
  const int* members;
  __device__ explicit DraftPass(const int* sent) : token(0), rows_each(1), count(0), least_logprob(0.0f), members(sent) {
    const int passes = sent[kPasses], *pass = sent + sent[kPassesAt] + sent[kPass];
    if (sent[kPass] >= passes) return;  // nothing was sent: the run before a capture
    token = pass[0], rows_each = pass[passes], least_logprob = __int_as_float(pass[2 * passes]);
    count = pass[3 * passes], members = sent + sent[kDraftersAt] + pass[4 * passes];
  }
};

// How many tokens a member may draft: its last draw must still fit.
__device__ __forceinline__ int most_drafted(const int* record, int length) { return min(length, record[kLimit] - record[kLength] - 1); }

__device__ __forceinline__ void set_table_row(const Args& a, int row, int token, int position, int seq_row, int ready_len) {
  set_row(a, row, token, position, a.table[seq_row * a.table_width + position], seq_row, position + 1, ready_len);
}

extern "C" __global__ void __launch_bounds__(kThreads) begin_draft(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  int* sent = a.sent;
  const int round = sent[kRound];
  const bool is_start = round == 0 && sent[kPass] == 0;
  if (is_start) take_news(a);
  const Members m(sent);
  if (is_start)
    for (int s = threadIdx.x; s < m.count; s += kThreads) {
      int* record = record_of(a, m.seq_rows[s]);
      if (m.tokens[s] >= 0) record[kNext] = m.tokens[s], record[kLength] = m.positions[s] + 1;
    }
  __syncthreads();
  const DraftPass pass(sent);
  for (int i = threadIdx.x; i < a.head_rows; i += kThreads) {
    const int s = i < pass.count ? pass.members[i] : 0, seq_row = i < pass.count ? m.seq_rows[s] : 0;
    const int* record = record_of(a, seq_row);
    if (i < pass.count && pass.token == 0) {
      c.counts[s] = 0;
      c.live[s] = round <= m.rounds[s] && record[kNext] >= 0 && most_drafted(record, m.lengths[s]) > 0;
    }
    const bool drafts = i < pass.count && c.live[s];
    const int row = pass.rows_each * (i + 1) - 1, position = record[kLength] - 1 + pass.token;
    const int ready_len = position + 1 - pass.rows_each;
    for (int each = row + 1 - pass.rows_each; each < row; ++each)  // the token before, which a second model may lack
      if (drafts) set_table_row(a, each, a.slot_tokens[a.table[seq_row * a.table_width + position - 1]], position - 1, seq_row, ready_len);
      else set_padding(a, each);
    if (drafts) set_table_row(a, row, pass.token ? c.drafts[m.base[s] + pass.token] : record[kNext], position, seq_row, ready_len);
    else set_padding(a, row);
    set_draw(a, i, row, a.seq_rows[row], -1, 0, 0);
  }
  if (is_start && threadIdx.x == 0) sent[kBinds] = sent[kUpdates] = 0;  // the pass itself has no news any more
}

extern "C" __global__ void __launch_bounds__(kThreads) end_draft(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const Members m(a.sent);
  const DraftPass pass(a.sent);
  mark_broken(a);
  for (int i = threadIdx.x; i < pass.count; i += kThreads) {
    const int s = pass.members[i], *record = record_of(a, m.seq_rows[s]);
    if (!c.live[s]) continue;
    const int token = record[kBroken] ? -1 : a.drawn[i], count = pass.token + 1;
    c.drafts[m.base[s] + count] = token;
    c.counts[s] = token >= 0 ? count : pass.token;
    c.live[s] = goes_on(record, token, record[kLength] + count) && a.logprobs[i] >= pass.least_logprob &&
                count < most_drafted(record, m.lengths[s]);
  }
  if (threadIdx.x == 0) ++a.sent[kPass];
}

// Behind begin_round, which has made padding of the rows to be drafted: those that were.
extern "C" __global__ void __launch_bounds__(kThreads) place_drafts(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const int *sent = a.sent, *owners = sent + sent[kOwnersAt];
  const Members m(sent);
  for (int i = threadIdx.x; i < sent[kOwners]; i += kThreads) {
    const int s = owners[i], n = i - m.base[s], draw = m.first[s] + n;
    if (n == 0 || n > c.counts[s]) continue;
    set_table_row(a, a.row_ids[draw], c.drafts[i], m.positions[s] + n, m.seq_rows[s], m.positions[s]);
    set_draw(a, draw, a.row_ids[draw], m.seq_rows[s], -1, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) begin_verify(const ChainArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  const int *sent = a.sent, *owners = sent + sent[kOwnersAt], round = sent[kRound];
  const Members m(sent);
  for (int i = threadIdx.x; i < a.rows; i += kThreads) {
    const int s = i < sent[kOwners] ? owners[i] : 0, seq_row = i < sent[kOwners] ? m.seq_rows[s] : 0;
    const int *record = record_of(a, seq_row), n = seq_row ? i - m.base[s] : 0, position = record[kLength] - 1;
    const bool goes = seq_row && round <= m.rounds[s] && record[kNext] >= 0;
    if (goes && (n == 0 || n <= c.counts[s])) set_table_row(a, i, n ? c.drafts[i] : record[kNext], position + n, seq_row, position);
    else set_padding(a, i);
    set_draw(a, i, i, a.seq_rows[i], -1, 0, 0);
  }
}

// Accept what was drafted as far as it was drawn, and go on behind it. `tokens` are the member's draws.
__device__ __forceinline__ void judge(const ChainArgs& c, const Members& m, int s, int row, const int* tokens, int* out) {
  const Args& a = c.step;
  const int length = a.positions[row] + 1, base = m.base[s], drafted = m.lengths[s] ? c.counts[s] : 0;
  const bool idles = a.slots[row] == kDumpSlot;
  int accepted = 0;
  while (accepted < drafted && c.drafts[base + 1 + accepted] == tokens[accepted]) ++accepted;
  int *record = record_of(a, m.seq_rows[s]), *shown = out + a.sent[kExtraAt] + base;
  for (int n = 1; n <= m.lengths[s]; ++n) shown[n] = n <= drafted ? c.drafts[base + n] : -1;
  out[a.sent[kExtraAt] + a.sent[kOwners] + s] = idles ? -1 : accepted;
  if (idles) return;
  bool ended = false;
  for (int n = 0; n <= accepted; ++n) ended |= !goes_on(record, tokens[n], length + 1 + n);
  record[kNext] = ended ? -1 : tokens[accepted], record[kLength] = length + 1 + accepted;
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
  mark_broken(a);
  const int round = sent[kRound], width = sent[kOutWidth];
  int* tokens = a.out + static_cast<int64>(round) * 2 * width;
  for (int i = threadIdx.x; i < sent[kOwners]; i += kThreads) {
    const bool is_padding = a.slots[i] == kDumpSlot;
    tokens[i] = is_padding || record_of(a, a.seq_rows[i])[kBroken] ? -1 : a.drawn[i];
    tokens[width + i] = is_padding ? 0 : __float_as_int(a.logprobs[i]);
  }
  __syncthreads();
  for (int s = threadIdx.x; s < m.count; s += kThreads) judge(c, m, s, m.base[s], tokens + m.base[s], tokens);
  if (threadIdx.x == 0) sent[kRound] = round + 1, sent[kPass] = 0;
}
