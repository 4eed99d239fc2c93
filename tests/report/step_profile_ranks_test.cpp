#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/train/step_profile.hpp"
#include "report/training.hpp"
#include "report/wide_network.hpp"

namespace step_profile_ranks_test {

namespace {

using lockstep::StepPhase;
using std::chrono::steady_clock;

struct Seen {
  std::vector<lockstep::PhaseSpan> spans;
  std::vector<lockstep::BucketReport> buckets;
  steady_clock::time_point began;
  double samples, global_samples, lr, seconds, forward;
};

}  // namespace

TEST_CASE("the profile of a step covers it without a gap, and the ranks wait for a late one") {
  const auto& world = test_world();
  auto options = short_run(1, /*accumulate=*/2);
  options.ddp.bucket_cap_mb = {0.015};
  lockstep::Trainer trainer{world, options, wide_network()};
  std::vector<Seen> seen;
  const bool late = world.rank() == world.size() - 1;
  trainer.fit(
      three_classes(64),
      [&](torch::nn::Sequential& net, const auto& batch) {
        if (late) std::this_thread::sleep_for(std::chrono::milliseconds(15));
        return cross_entropy_of(net, batch);
      },
      lockstep::OnProfile{[&](const lockstep::StepReport&, const lockstep::StepProfile& profile) {
        seen.push_back({{profile.spans.begin(), profile.spans.end()},
                        profile.reduction.buckets,
                        profile.reduction.began,
                        profile.samples,
                        profile.global_samples,
                        profile.lr,
                        profile.seconds(),
                        profile.seconds(StepPhase::forward)});
      }});

  const std::size_t steps = 64 / 8 / static_cast<std::size_t>(world.size());
  REQUIRE(seen.size() == steps);
  for (std::size_t step = 0; step < steps; ++step) {
    const Seen& now = seen[step];
    CHECK(now.samples == 8);
    CHECK(now.global_samples == 8 * world.size());
    CHECK(now.lr == 0.1);
    double sum = 0;
    for (std::size_t i = 0; i < now.spans.size(); ++i) {
      const auto& span = now.spans[i];
      CHECK(span.begin <= span.end);
      if (i > 0) CHECK(span.begin == now.spans[i - 1].end);
      sum += std::chrono::duration<double>(span.end - span.begin).count();
    }
    CHECK(sum == Approx(now.seconds));
    const auto backwards = std::count_if(now.spans.begin(), now.spans.end(),
                                         [](const auto& span) { return span.phase == StepPhase::backward; });
    CHECK(backwards == 2);
    if (late) CHECK(now.forward >= 0.03);
    // The ranks of one host share a clock: no rank's reduction ends before the gradients of all ranks.
    const auto ready = std::find_if(now.spans.rbegin(), now.spans.rend(),
                                    [](const auto& span) { return span.phase == StepPhase::backward; });
    const auto latest =
        trainer.comm().all_gather_bytes(std::to_string(ready->end.time_since_epoch().count()));
    REQUIRE(ready != now.spans.rbegin());
    const lockstep::PhaseSpan& wait = *ready.base();
    CHECK(wait.phase == StepPhase::communication);
    for (const std::string& there : latest) CHECK(wait.end.time_since_epoch().count() > std::stoll(there));

    // The first reduction's buckets are replaced.
    if (step == 0) continue;
    REQUIRE(now.buckets.size() > 2);
    const auto end = std::chrono::duration<double>(now.spans.back().end - now.began).count();
    for (const auto& bucket : now.buckets) {
      CHECK(bucket.launched > 0);
      CHECK(bucket.completed > bucket.launched);
      CHECK(bucket.completed < end);
    }
  }
}

TEST_CASE("completions are recorded only for a profile") {
  lockstep::Trainer trainer{test_world(), short_run(1), wide_network()};
  trainer.fit(three_classes(32), cross_entropy_of, lockstep::OnProfile{[](const auto&, const auto&) {}});
  CHECK(trainer.ddp().report().buckets.at(0).completed > 0);
  trainer.fit(three_classes(32), cross_entropy_of);
  CHECK(trainer.ddp().report().buckets.at(0).completed == 0);
}

}  // namespace step_profile_ranks_test
