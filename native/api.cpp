// The C interface: threads, the choice of an instruction set, and one call per pass. Compiled for every CPU alike.
#include "api.h"
#include "pack.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vs {

extern const Table table_portable;
#if defined(VS_HAS_AVX2)
extern const Table table_avx2;
#endif
#if defined(VS_HAS_AVX512)
extern const Table table_avx512;
#endif

void sort_descending(float* values, int64_t count) { std::sort(values, values + count, std::greater<float>()); }

void select_descending(float* values, int64_t count, int64_t num_best) {
  if (num_best < count) std::nth_element(values, values + num_best - 1, values + count, std::greater<float>());
  sort_descending(values, num_best);
}

// Round to nearest, denormals kept: whatever the caller's thread was set to, it gets back afterwards.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

void relax(int spins) {
  if (spins < 2000) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  } else {
    std::this_thread::yield();
  }
}

// Threads that live as long as the pool; the caller is thread 0. A job is over when all of its phases are, whether or not
// every thread took part: one that has not woken up yet is not waited for.
class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads) {
    for (int tid = 1; tid < num_threads; ++tid) threads_.emplace_back([this, tid] { work(tid); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int num_threads() const { return num_threads_; }

  void run(int num_phases, const std::function<void(Crew)>& job) {
    FloatMode mode;
    phases_.assign(size_t(num_phases), Phase{});
    if (num_threads_ == 1) return job({0, 1, phases_.data()});
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job({0, num_threads_, phases_.data()});
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;
    }
    for (int spins = 0; active_.load(std::memory_order_acquire) > 0; ++spins) relax(spins);
  }

 private:
  void work(int tid) {
    FloatMode mode;
    int64_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < 3000 && generation_.load(std::memory_order_acquire) == seen; ++spins) relax(0);
      const std::function<void(Crew)>* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        if (stopping_) return;
        seen = generation_.load(std::memory_order_acquire);
        job = job_;
        if (job) active_.fetch_add(1, std::memory_order_relaxed);
      }
      if (!job) continue;
      (*job)({tid, num_threads_, phases_.data()});
      active_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int num_threads_;
  std::vector<Phase> phases_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(Crew)>* job_ = nullptr;
  std::atomic<int64_t> generation_{0};
  std::atomic<int> active_{0};
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

struct Engine {
  Engine(const Table* kernels, int num_threads) : table(kernels), pool(num_threads) {}
  const Table* table;
  Pool pool;
  std::vector<char> scratch;
  std::vector<float> sampling_scratch;

  void* reserve(size_t nbytes) {
    if (scratch.size() < nbytes + 64) scratch.resize(nbytes + 64);
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  }

  const Arithmetic& arithmetic(int id) const { return id == kHopper ? *table->hopper : *table->cpu; }
  const Arithmetic& arithmetic(const Model& model) const { return arithmetic(model.arithmetic); }

  void* reserve(const Model& model, int num_rows, int max_context) {
    return reserve(arithmetic(model).scratch_nbytes(model, num_rows, pool.num_threads(), max_context));
  }

  float* reserve_rows(int vocab) {
    const size_t count = size_t(pool.num_threads()) * 2 * vocab;
    if (sampling_scratch.size() < count) sampling_scratch.resize(count);
    return sampling_scratch.data();
  }
};

static int longest_context(const Rows& rows) {
  int longest = 1;
  for (int r = 0; r < rows.num_rows; ++r) longest = std::max(longest, rows.prefix_lens[r] + rows.tail_lens[r]);
  return longest;
}

static const Table* find(const char* name) {
  std::vector<const Table*> known;
#if defined(VS_HAS_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512dq"))
    known.push_back(&table_avx512);
#endif
#if defined(VS_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) known.push_back(&table_avx2);
#endif
  known.push_back(&table_portable);
  const std::string_view wanted(name);
  if (wanted.empty()) return known.front();
  for (const Table* table : known)
    if (wanted == table->name) return table;
  return nullptr;
}

}  // namespace vs

using namespace vs;

VS_API int vs_abi() { return 11; }

// "" is the best instruction set here; null if it is unknown, or unknown to this CPU.
VS_API Engine* vs_create(const char* isa, int num_threads) {
  const Table* table = find(isa);
  return table ? new Engine(table, num_threads) : nullptr;
}

VS_API void vs_destroy(Engine* engine) { delete engine; }

VS_API const char* vs_isa(const Engine* engine) { return engine->table->name; }

// Weights in the kernels' layout. False if a scale, or a float weight, is not finite.
VS_API int vs_pack(Engine* engine, const StoredMatrix* matrix, uint8_t* out) {
  int32_t num_bad = 0;
  engine->pool.run(1, [&](Crew crew) { pack(crew, *matrix, out, &num_bad); });
  return num_bad == 0;
}

// Layers first .. end - 1 on the hidden states of all rows, [num_rows][hidden]; first = -1 begins with the embedding.
VS_API void vs_layers(Engine* engine, const Model* model, const Rows* rows, const Store* store,
                      const uint8_t* skip_attention, const uint8_t* skip_mlp, float* x, int first, int end) {
  void* scratch = engine->reserve(*model, rows->num_rows, longest_context(*rows));
  const Arithmetic& arithmetic = engine->arithmetic(*model);
  engine->pool.run(arithmetic.num_phases(*model), [&](Crew crew) {
    arithmetic.forward(crew, *model, *rows, *store, skip_attention, skip_mlp, x, first, end, scratch);
  });
}

static void vs_forward(Engine* engine, const Model* model, const Rows* rows, const Store* store,
                       const uint8_t* skip_attention, const uint8_t* skip_mlp, float* x) {
  vs_layers(engine, model, rows, store, skip_attention, skip_mlp, x, -1, model->num_layers);
}

// Logits of hidden states, [num_rows][vocab], and the totals of each row.
VS_API void vs_logits(Engine* engine, const Model* model, const float* x, int num_rows, float* y, Totals* totals) {
  void* scratch = engine->reserve(*model, num_rows, 1);
  engine->pool.run(3, [&](Crew crew) {
    engine->arithmetic(*model).logits(crew, *model, x, num_rows, y, totals, scratch);
  });
}

VS_API void vs_totals(Engine* engine, const float* logits, int num_rows, int vocab, Totals* out) {
  engine->pool.run(1, [&](Crew crew) { engine->table->totals(crew, logits, num_rows, vocab, out); });
}

VS_API void vs_draw(Engine* engine, const float* logits, const int32_t* logit_rows, const Totals* totals, int vocab,
                    const Sampling* sampling, int64_t* token_ids, float* logprobs) {
  float* scratch = engine->reserve_rows(vocab);
  engine->pool.run(1, [&](Crew crew) {
    engine->table->draw(crew, logits, logit_rows, totals, vocab, *sampling, token_ids, logprobs, scratch);
  });
}

namespace {

// One round's rows, each with its context in the table, and the sequences that draw at some of them.
struct Batch {
  std::vector<int32_t> token_ids, positions, slots, seq_rows, prefix_lens, tail_lens, head_rows, logit_rows;
  std::vector<uint64_t> seeds;
  std::vector<int64_t> t, sample_index, stream, top_k, masks, drawn;
  std::vector<float> temperature, top_p, log_min_p, logprobs, x, heads, y;
  std::vector<Totals> totals;

  void clear() {
    for (auto* part : {&token_ids, &positions, &slots, &seq_rows, &prefix_lens, &tail_lens, &head_rows, &logit_rows})
      part->clear();
    for (auto* part : {&t, &sample_index, &stream, &top_k, &masks}) part->clear();
    for (auto* part : {&temperature, &top_p, &log_min_p}) part->clear();
    seeds.clear();
  }

  void add(const Rows& rows, int32_t seq_row, int64_t token, int64_t position) {
    token_ids.push_back(int32_t(token)), positions.push_back(int32_t(position)), seq_rows.push_back(seq_row);
    slots.push_back(rows.table[int64_t(seq_row) * rows.table_width + position]);
    prefix_lens.push_back(int32_t(position + 1)), tail_lens.push_back(0);
  }

  // The last row draws, as sequence i does.
  void draw(const Sampling& all, int i) {
    logit_rows.push_back(int32_t(head_rows.size())), head_rows.push_back(int32_t(token_ids.size()) - 1);
    seeds.push_back(all.seeds[i]), sample_index.push_back(all.sample_index[i]), top_k.push_back(all.top_k[i]);
    t.push_back(positions.back() + 1), stream.push_back(0);
    temperature.push_back(all.temperature[i]), top_p.push_back(all.top_p[i]), log_min_p.push_back(all.log_min_p[i]);
    masks.push_back(all.masks ? all.masks[i] : 0);
  }

  // vs_forward, vs_logits and vs_draw, so it gives their bits.
  void run(Engine* engine, const Model& model, const Store& store, const uint8_t* skip_attention,
           const uint8_t* skip_mlp, const Rows& rows, const Sampling& all) {
    const int num = int(token_ids.size()), num_heads = int(head_rows.size());
    const Rows own = {num, 0, rows.table_width, token_ids.data(), positions.data(), slots.data(), seq_rows.data(),
                      prefix_lens.data(), nullptr, tail_lens.data(), rows.table};
    Sampling sampling = {};
    sampling.num_rows = num_heads, sampling.seeds = seeds.data(), sampling.t = t.data();
    sampling.sample_index = sample_index.data(), sampling.stream = stream.data(), sampling.top_k = top_k.data();
    sampling.temperature = temperature.data(), sampling.top_p = top_p.data(), sampling.log_min_p = log_min_p.data();
    sampling.masks = masks.data(), sampling.allowed = all.allowed, sampling.mask_words = all.mask_words;
    const size_t hidden = size_t(model.hidden);
    fit(x, num * hidden), fit(y, size_t(num_heads) * model.vocab);
    fit(totals, size_t(num_heads)), fit(drawn, size_t(num_heads)), fit(logprobs, size_t(num_heads));
    vs_forward(engine, &model, &own, &store, skip_attention, skip_mlp, x.data());
    const float* states = x.data();
    if (num_heads < num) {
      fit(heads, num_heads * hidden);
      for (int j = 0; j < num_heads; ++j) std::copy_n(&x[head_rows[j] * hidden], hidden, &heads[j * hidden]);
      states = heads.data();
    }
    vs_logits(engine, &model, states, num_heads, y.data(), totals.data());
    vs_draw(engine, y.data(), logit_rows.data(), totals.data(), model.vocab, &sampling, drawn.data(), logprobs.data());
  }

  template <class T>
  static void fit(std::vector<T>& values, size_t count) {
    if (values.size() < count) values.resize(count);
  }
};

// Whether sequence i has a further token to draw behind this one, at position t.
static bool goes_on(const Burst& burst, int i, int64_t token, int64_t t) {
  if (token < 0 || t + 1 >= burst.limits[i]) return false;
  for (int k = 0; k < burst.num_stop_ids && t + 1 >= burst.min_lens[i]; ++k)
    if (burst.stop_ids[size_t(i) * burst.num_stop_ids + k] == token) return false;
  return true;
}

// The token of sequence i whose row was at a position, at any before the last one's.
static int32_t& token_at(const Rows& rows, const Burst& burst, int i, int64_t position) {
  return burst.slot_tokens[rows.table[int64_t(burst.seq_rows[i]) * rows.table_width + position]];
}

static int64_t* draft_of(const Burst& burst, int i, int round) {
  return burst.drafts + (size_t(i) * burst.num_rounds + round) * burst.max_draft;
}

static int64_t draft_len(const Burst& burst, int i) {
  return std::min<int64_t>(burst.draft_lens[i], burst.limits[i] - burst.t[i] - 2);
}

// `looked_up` of backends/rounds.py: what followed the last 4, 3 or 2 tokens the last time they occurred before, the most of
// them that did; up to a stop id. `text` is scratch.
static void look_up(const Rows& rows, const Burst& burst, int i, int round, std::vector<int32_t>& text) {
  constexpr int most = 4, least = 2;
  const int last = int(burst.t[i]);
  text.resize(size_t(last) + 1);
  for (int p = 0; p < last; ++p) text[p] = token_at(rows, burst, i, p);
  text[last] = int32_t(burst.tokens[i]);
  int matched = least - 1, behind = -1;  // the longest match so far, the newest of that length
  for (int end = last - 1; end + 1 >= least && matched < most; --end) {
    int count = 0;
    while (count < most && count <= end && text[end - count] == text[last - count]) ++count;
    if (count > matched) matched = count, behind = end + 1;
  }
  if (behind < 0) return;
  int64_t* draft = draft_of(burst, i, round);
  for (int64_t k = 0; k < draft_len(burst, i) && behind + k <= last; ++k) {
    draft[k] = text[behind + k];
    if (!goes_on(burst, i, draft[k], last + 1 + k)) return;
  }
}

// The drafts of one round: a pass per token, of the sequences whose drafts go on.
static void draft_round(Engine* engine, const Rows& rows, const Sampling& all, const Burst& burst,
                        const Drafting& drafting, int round, const std::vector<int>& going, Batch& batch) {
  std::vector<int> live, longer;
  for (const int i : going)
    if (draft_len(burst, i) > 0) live.push_back(i);
  if (!drafting.model) {
    std::vector<int32_t> text;
    for (const int i : live) look_up(rows, burst, i, round, text);
    return;
  }
  for (int k = 0; !live.empty(); ++k) {
    batch.clear();
    for (const int i : live) {
      const int64_t t = burst.t[i];
      if (k == 0 && drafting.first_rows == 2)
        batch.add(rows, burst.seq_rows[i], token_at(rows, burst, i, t - 1), t - 1);
      batch.add(rows, burst.seq_rows[i], k ? draft_of(burst, i, round)[k - 1] : burst.tokens[i], t + k);
      batch.draw(all, i);
    }
    batch.run(engine, *drafting.model, *drafting.store, drafting.skip_attention, drafting.skip_mlp, rows, all);
    longer.clear();
    for (size_t j = 0; j < live.size(); ++j) {
      const int i = live[j];
      const int64_t token = draft_of(burst, i, round)[k] = batch.drawn[j];
      if (goes_on(burst, i, token, burst.t[i] + 1 + k) && batch.logprobs[j] >= drafting.least_logprob &&
          k + 1 < draft_len(burst, i))
        longer.push_back(i);
    }
    live.swap(longer);
  }
}

}  // namespace

// Rounds without the host: draft, verify, keep what the target drew itself and feed back its draw behind that.
VS_API void vs_burst(Engine* engine, const Model* model, const Rows* rows, const Store* store,
                     const uint8_t* skip_attention, const uint8_t* skip_mlp, const Sampling* all, const Burst* burst,
                     const Drafting* drafting) {
  const int count = burst->num_sequences, most = burst->max_draft;
  const int64_t width = int64_t(burst->num_rounds) * (1 + most);
  std::vector<int> going;
  std::vector<int64_t> num_drawn(size_t(count), burst->first_round);
  Batch batch;
  for (int round = burst->first_round; round < burst->end_round; ++round) {
    going.clear();
    for (int i = 0; i < count; ++i)
      if (round < burst->rounds[i] && burst->tokens[i] >= 0) going.push_back(i);
    if (going.empty()) return;
    if (drafting) draft_round(engine, *rows, *all, *burst, *drafting, round, going, batch);
    batch.clear();
    for (const int i : going) {
      const int64_t* draft = draft_of(*burst, i, round);
      batch.add(*rows, burst->seq_rows[i], burst->tokens[i], burst->t[i]);
      batch.draw(*all, i);
      for (int k = 0; k < most && draft[k] >= 0; ++k) {
        batch.add(*rows, burst->seq_rows[i], draft[k], burst->t[i] + 1 + k);
        batch.draw(*all, i);
      }
    }
    batch.run(engine, *model, *store, skip_attention, skip_mlp, *rows, *all);
    int row = 0;
    for (const int i : going) {
      const int64_t* draft = draft_of(*burst, i, round);
      int drafted = 0, accepted = 0;
      while (drafted < most && draft[drafted] >= 0) ++drafted;
      while (accepted < drafted && draft[accepted] == batch.drawn[row + accepted]) ++accepted;
      bool ends = false;
      for (int k = 0; k <= accepted; ++k) {
        const int64_t token = batch.drawn[row + k], at = i * width + num_drawn[i]++;
        burst->drawn[at] = token, burst->logprobs[at] = batch.logprobs[row + k];
        token_at(*rows, *burst, i, burst->t[i]) = int32_t(burst->tokens[i]);
        burst->tokens[i] = token, ++burst->t[i];
        ends = ends || !goes_on(*burst, i, token, burst->t[i]);
      }
      if (ends) burst->tokens[i] = -1;
      burst->accepted[size_t(i) * burst->num_rounds + round] = accepted;
      row += 1 + drafted;
    }
  }
}

VS_API void vs_top_k(Engine* engine, const float* logits, const int32_t* logit_rows, int num_rows, int vocab, int k,
                     int64_t* token_ids, float* values) {
  engine->pool.run(1, [&](Crew crew) {
    engine->table->top_k(crew, logits, logit_rows, num_rows, vocab, k, token_ids, values);
  });
}

VS_API void vs_noisy_top_k(Engine* engine, const float* logits, const int32_t* logit_rows, int vocab,
                           const Sampling* sampling, int k, int64_t* token_ids, float* values, float* logprobs) {
  float* scratch = engine->reserve_rows(vocab);
  engine->pool.run(1, [&](Crew crew) {
    engine->table->noisy_top_k(crew, logits, logit_rows, vocab, *sampling, k, token_ids, values, logprobs, scratch);
  });
}

// Single kernels, for the audit and for tests.
VS_API void vs_linear(Engine* engine, int arithmetic, const Matrix* m, const float* x, int num_rows, float* y) {
  Model sizes = {};
  sizes.arithmetic = arithmetic;
  sizes.hidden = m->num_in, sizes.mlp = m->num_in, sizes.num_heads = 1, sizes.num_kv_heads = 1, sizes.head_dim = 1;
  void* scratch = engine->reserve(sizes, num_rows, 1);
  engine->pool.run(2, [&](Crew crew) { engine->arithmetic(sizes).linear(crew, *m, x, num_rows, y, scratch); });
}

VS_API void vs_norm(Engine* engine, const float* x, const float* weight, int num_rows, int width, float eps, float* y) {
  engine->pool.run(1, [&](Crew crew) { engine->table->norm(crew, x, weight, num_rows, width, eps, y); });
}

VS_API void vs_activate(Engine* engine, int arithmetic, int activation, const float* gate_up, int num_rows, int mlp,
                        float* y) {
  const Arithmetic& chosen = engine->arithmetic(arithmetic);
  engine->pool.run(1, [&](Crew crew) { chosen.activate(crew, activation, gate_up, num_rows, mlp, y); });
}

VS_API void vs_attend(Engine* engine, const Model* model, const Rows* rows, const Store* store, int layer, const float* q,
                      float* out) {
  void* scratch = engine->reserve(*model, rows->num_rows, longest_context(*rows));
  const Arithmetic& arithmetic = engine->arithmetic(*model);
  engine->pool.run(1, [&](Crew crew) { arithmetic.attend(crew, *model, *rows, *store, layer, q, out, scratch); });
}

// 0 exp, 1 log, 2 the noise of the 32-bit words, 3 to float16 and back.
VS_API void vs_elementary(Engine* engine, int which, const float* x, int64_t count, float* y) {
  engine->pool.run(1, [&](Crew crew) { engine->table->elementary(crew, which, x, count, y); });
}
