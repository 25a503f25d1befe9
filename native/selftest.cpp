// Prints a hash of what each kernel computes from fixed inputs: equal lines mean equal bits. For machines without Python,
// and for emulators (`make native-aarch64`); Python's tests compare the instruction sets of one machine.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "api.h"

using namespace vs;

struct Engine;
extern "C" {
Engine* vs_create(const char* isa, int num_threads);
const char* vs_isa(const Engine*);
void vs_linear(Engine*, int, const Matrix*, const float*, int, float*);
void vs_norm(Engine*, const float*, const float*, int, int, float, float*);
void vs_activate(Engine*, int, int, const float*, int, int, float*);
void vs_attend(Engine*, const Model*, const Rows*, const Store*, int, const float*, float*);
void vs_totals(Engine*, const float*, int, int, Totals*);
void vs_draw(Engine*, const float*, const int32_t*, const Totals*, int, const Sampling*, int64_t*, float*);
void vs_elementary(Engine*, int, const float*, int64_t, float*);
}

static uint64_t state = 88172645463325252ull;

static uint32_t next_word() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return uint32_t(state >> 32);
}

static float next_float() { return (float(next_word() >> 8) / 16777216.0f - 0.5f) * 4.0f; }

static std::vector<float> floats(size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = next_float();
  return values;
}

static void print(const char* name, const void* data, size_t nbytes) {
  uint64_t hash = 1469598103934665603ull;
  for (size_t i = 0; i < nbytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211ull;
  std::printf("%-16s %016llx\n", name, static_cast<unsigned long long>(hash));
}

template <class T>
static void append(std::vector<uint8_t>& data, T value) {
  const uint8_t* from = reinterpret_cast<const uint8_t*>(&value);
  data.insert(data.end(), from, from + sizeof value);
}

static void check_linear(Engine* engine, int arithmetic, int format, const char* name, size_t block_nbytes) {
  const int num_out = 83, num_in = 256, num_rows = 7, groups = (num_out + kLanes - 1) / kLanes;
  std::vector<uint8_t> data;
  if (format == kF32) {
    for (int i = 0; i < groups * kLanes * num_in; ++i) append(data, next_float());
  } else if (format < kQ4) {
    for (int i = 0; i < groups * kLanes * num_in; ++i) append(data, uint16_t(0x3000 | (next_word() & 0x87ff)));
  } else {
    const size_t values_nbytes = format <= kQ4AffineWide ? 256 : 512;
    const bool wide = format == kQ4AffineWide || format >= kQ8Wide;
    for (int block = 0; block < groups * num_in / kBlock; ++block) {
      for (size_t i = 0; i < values_nbytes; ++i) data.push_back(uint8_t(next_word()));
      for (size_t i = values_nbytes; i < block_nbytes; i += wide ? 4 : 2) {
        if (wide)
          append(data, next_float() * 0.01f);
        else
          append(data, uint16_t(0x2000 | (next_word() & 0x83ff)));
      }
    }
  }
  const Matrix matrix = {format, num_out, num_in, data.data()};
  const std::vector<float> x = floats(size_t(num_rows) * num_in);
  std::vector<float> y(size_t(num_rows) * num_out);
  vs_linear(engine, arithmetic, &matrix, x.data(), num_rows, y.data());
  print(name, y.data(), y.size() * 4);
}

static void check_attention(Engine* engine, int arithmetic, bool is_half, int window) {
  const int num_slots = 70, num_rows = 3, d = 24, stride = 32, heads = 6, kv_heads = 2;
  Layer layer = {};
  layer.query_scalar = d, layer.window = window;
  Model model = {};
  model.layers = &layer, model.num_layers = 1;
  model.num_heads = heads, model.num_kv_heads = kv_heads, model.head_dim = d, model.kv_is_half = is_half;
  model.arithmetic = arithmetic;
  model.hidden = heads * d, model.mlp = heads * d;
  std::vector<uint8_t> parts[2];
  for (std::vector<uint8_t>& part : parts)
    for (int i = 0; i < num_slots * kv_heads * stride; ++i) {
      const bool real = i % stride < d;
      if (is_half)
        append(part, uint16_t(real ? next_word() & 0xbfff : 0));
      else
        append(part, real ? next_float() : 0.0f);
    }
  std::vector<int32_t> table(2 * num_slots), zeros(num_rows), seq_rows = {1, 0, 1}, prefix_lens = {60, 17, 1};
  for (int32_t& slot : table) slot = int32_t(next_word() % num_slots);
  std::vector<int32_t> tails = {5, 6, 7, 0, 9, 0}, tail_lens = {2, 1, 0};
  const Rows rows = {num_rows,           2,            num_slots,        zeros.data(),
                     zeros.data(),       zeros.data(), seq_rows.data(),  prefix_lens.data(),
                     tails.data(),       tail_lens.data(), table.data()};
  const Store store = {parts[0].data(), parts[1].data(), num_slots};
  const std::vector<float> q = floats(size_t(num_rows) * heads * d);
  std::vector<float> out(q.size());
  vs_attend(engine, &model, &rows, &store, 0, q.data(), out.data());
  print(arithmetic == kHopper ? "hopper attention" : window ? "attention window" : is_half ? "attention half" : "attention", out.data(), out.size() * 4);
}

static void check_sampling(Engine* engine) {
  const int vocab = 1000, num_rows = 4;
  std::vector<float> logits = floats(size_t(num_rows) * vocab), logprobs(num_rows);
  std::vector<Totals> totals(num_rows);
  vs_totals(engine, logits.data(), num_rows, vocab, totals.data());
  const float off = -__builtin_inff();
  const uint64_t seeds[] = {1, 2, 3, 18446744073709551615ull};
  const int64_t t[] = {5, 6, 7, 8}, sample_index[] = {0, 0, 1, 2}, stream[] = {0, 0, 258, 0}, top_k[] = {0, 40, 0, 0};
  const float temperature[] = {0.0f, 0.7f, 1.0f, 1.5f}, top_p[] = {1.0f, 1.0f, 0.9f, 1.0f};
  const float log_min_p[] = {off, off, off, -3.0f};
  Sampling sampling = {};
  sampling.num_rows = num_rows;
  sampling.seeds = seeds, sampling.t = t, sampling.sample_index = sample_index, sampling.stream = stream, sampling.top_k = top_k;
  sampling.temperature = temperature, sampling.top_p = top_p, sampling.log_min_p = log_min_p;
  const int32_t rows[] = {0, 1, 2, 3};
  int64_t token_ids[num_rows];
  vs_draw(engine, logits.data(), rows, totals.data(), vocab, &sampling, token_ids, logprobs.data());
  print("draw", token_ids, sizeof token_ids);
  print("logprob", logprobs.data(), sizeof(float) * num_rows);
}

int main(int argc, char** argv) {
  Engine* engine = vs_create(argc > 1 ? argv[1] : "", argc > 2 ? std::stoi(argv[2]) : 2);
  if (!engine) {
    std::fprintf(stderr, "no such kernels here\n");
    return 1;
  }
  std::fprintf(stderr, "kernels: %s\n", vs_isa(engine));
  const char* names[] = {"f32", "f16", "bf16", "q4", "q4 affine", "q4 affine wide", "q8", "q8 wide", "q8 affine wide",
                         "q8 halves"};
  const size_t nbytes[] = {0, 0, 0, 288, 320, 384, 544, 576, 640, 640};
  for (int format = 0; format < 10; ++format) check_linear(engine, kCpu, format, names[format], nbytes[format]);
  check_linear(engine, kHopper, kBF16, "hopper linear", 0);
  const std::vector<float> x = floats(5 * 100), weight = floats(100);
  std::vector<float> y(x.size());
  vs_norm(engine, x.data(), weight.data(), 5, 100, 1e-5f, y.data());
  print("norm", y.data(), y.size() * 4);
  for (int activation : {kSilu, kGeluTanh}) {
    vs_activate(engine, kCpu, activation, x.data(), 5, 50, y.data());
    print(activation == kSilu ? "silu" : "gelu tanh", y.data(), 5 * 50 * 4);
  }
  const char* labels[] = {"exp", "log", "noise", "float16"};
  for (int which = 0; which < 4; ++which) {
    std::vector<float> in = floats(4096), out(in.size());
    for (float& value : in) value = which == 1 ? value * value + 0.001f : value;
    vs_elementary(engine, which, in.data(), int64_t(in.size()), out.data());
    print(labels[which], out.data(), out.size() * 4);
  }
  check_attention(engine, kCpu, false, 0);
  check_attention(engine, kCpu, true, 0);
  check_attention(engine, kCpu, true, 19);
  check_attention(engine, kHopper, true, 0);
  check_sampling(engine);
  return 0;
}
