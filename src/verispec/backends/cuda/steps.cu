// The two ends of a round: what the host sent becomes the inputs of a pass, and what was drawn becomes results and state.
// Both run as one block: a round has few rows, and the second half of each kernel needs all of the first.
#include "steps.cuh"

// One block. It releases nobody early, and the embedding behind it waits: everything below reads what stands here.
extern "C" __global__ void __launch_bounds__(kThreads) begin_round(const Args a) {
  wait_for_previous();
  const int* sent = a.sent;
  const int round = sent[kRound];
  if (round == 0) take_news(a);
  if (a.is_round) {
    const int members = sent[kMembers], *member = sent + sent[kMembersAt];
    bool has_rows = false;
    for (int i = threadIdx.x; i < a.rows; i += kThreads) {
      const int seq_row = i < members ? member[i] : 0, token = i < members ? member[2 * members + i] : -1;
      const bool goes_on = i < members && round <= member[members + i];
      if (round == 0 && token >= 0) {
        int* record = record_of(a, seq_row);
        record[kNext] = token, record[kLength] = member[3 * members + i] + 1;
      }
      set_from_record(a, i, seq_row, goes_on);
      set_draw(a, i, i, a.seq_rows[i], -1, 0, 0);  // of this thread's own row
      has_rows |= a.slots[i] != kDumpSlot;
    }
    set_busy(a, has_rows);
    return;
  }
  const int* column = sent + sent[kRowsAt];  // tokens, positions, slots, sequences, lengths of prefixes and of what is ready
  const int width = sent[kTailWidth], n = a.rows;
  set_busy(a, true);
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int seq_row = column[3 * n + i];
    if (column[i] < 0) set_from_record(a, i, seq_row, true);
    else set_row(a, i, column[i], column[n + i], column[2 * n + i], seq_row, column[4 * n + i], column[5 * n + i]);
  }
  for (int i = threadIdx.x; i < n * width; i += kThreads)
    a.tails[i / width * a.tail_width + i % width] = sent[sent[kTailsAt] + i];
  for (int i = threadIdx.x; i < 2 * a.num_groups; i += kThreads)
    a.groups[i] = i < 2 * sent[kGroups] ? sent[sent[kGroupsAt] + i] : 0;
  __syncthreads();
  const int draws = sent[kDraws], *draw = sent + sent[kDrawsAt];
  for (int i = threadIdx.x; i < a.head_rows; i += kThreads) {
    if (i < draws) set_draw(a, i, draw[i], a.seq_rows[draw[i]], draw[draws + i], draw[2 * draws + i], draw[3 * draws + i]);
    else set_draw(a, i, 0, 0, 0, 0, 0);  // padding draws greedily
  }
}

// The token drawn at row i of the head as the sequence's next, if it has a next.
__device__ __forceinline__ void remember(const Args& a, int row, int token) {
  int* record = record_of(a, a.seq_rows[row]);
  const int length = a.positions[row] + 2;
  record[kNext] = goes_on(record, token, length) ? token : -1;
  record[kLength] = length;
}

struct ChildrenArgs {
  Args step;
  const int* offered;  // [3, head_rows, k]: children, log p + noise, log p
  int k;
};

// One block, in the place of end_round: the same of the rows that were asked for, [3, draws, k], none of a broken row.
extern "C" __global__ void __launch_bounds__(kThreads) end_children(const ChildrenArgs c) {
  wait_for_previous();
  const Args& a = c.step;
  note_broken(a);
  const int draws = a.sent[kDraws], count = draws * c.k;
  for (int i = threadIdx.x; i < draws; i += kThreads) a.broken_rows[i] = is_broken(a, a.row_ids[i]);
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const bool broken = a.broken_rows[i / c.k];
    for (int part = 0; part < 3; ++part)
      a.out[part * count + i] = !broken ? c.offered[part * a.head_rows * c.k + i] : part ? __float_as_int(neg_inf()) : -1;
  }
}

// One block.
extern "C" __global__ void __launch_bounds__(kThreads) end_round(const Args a) {
  wait_for_previous();
  int* sent = a.sent;
  note_broken(a);
  const int round = sent[kRound], width = sent[kOutWidth], count = a.is_round ? sent[kMembers] : sent[kDraws];
  int* tokens = a.out + static_cast<int64>(round) * 2 * width;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int row = a.row_ids[i];
    const bool is_padding = a.slots[row] == kDumpSlot;
    const int token = is_padding ? -1 : drawn_at(a, i, row);
    tokens[i] = token;
    tokens[width + i] = is_padding ? 0 : __float_as_int(a.logprobs[i]);
    if (a.is_round && !is_padding) remember(a, row, token);
  }
  __syncthreads();
  if (!a.is_round)
    for (int i = threadIdx.x; i < sent[kFed]; i += kThreads) {
      const int at = sent[sent[kFedAt] + i], row = a.row_ids[at];
      if (a.slots[row] != kDumpSlot) remember(a, row, tokens[at]);
    }
  if (threadIdx.x == 0) sent[kRound] = round + 1;
}
