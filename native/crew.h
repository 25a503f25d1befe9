// How kernels share work: `run` gives the chunks of one phase to whichever thread asks, and returns when all are done.
#pragma once
#include "api.h"

namespace vs {
namespace {

// Chunks of a phase with so many equal items: enough that a slow thread does not hold up the others for long.
static inline int num_chunks(int64_t items, int num_threads) {
  const int64_t wanted = num_threads == 1 ? 1 : 3 * num_threads;
  return int(items < wanted ? items : wanted);
}

template <class Work>
static inline void run(Crew& crew, int64_t items, const Work& work) {  // work(begin, end)
  Phase& phase = *crew.phase++;
  const int total = num_chunks(items, crew.num_threads);
  for (;;) {
    const int chunk = __atomic_fetch_add(&phase.next, 1, __ATOMIC_RELAXED);
    if (chunk >= total) break;
    work(items * chunk / total, items * (chunk + 1) / total);
    __atomic_fetch_add(&phase.done, 1, __ATOMIC_RELEASE);
  }
  for (int spins = 0; __atomic_load_n(&phase.done, __ATOMIC_ACQUIRE) < total; ++spins) relax(spins);
}

}  // namespace
}  // namespace vs
