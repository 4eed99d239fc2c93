// What a loop by hand saves beside the model and the optimizer, so that a resumed run has the same bits.
#include <string>

#include "grad/models.hpp"
#include "lockstep/grad/hooks/post_local_sgd_hook.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/optim/optimizers.hpp"

namespace state_ranks_test {

using lockstep::AllReduceHook;
using lockstep::CheckpointError;
using lockstep::DdpOptions;
using lockstep::DistributedDataParallel;
using lockstep::GradientStorage;
using lockstep_test::TestedComm;

namespace {

constexpr int steps = 6;

template <class Hook>
struct Run {
  explicit Run(const DdpOptions& options, Hook hook = {})
      : ddp(net, shared_comm(), options, std::move(hook)) {}

  void train(int first, int last) {
    for (int step = first; step < last; ++step) {
      optimizer.zero_grad();
      ddp.backward(ddp(batch_of(test_world().rank(), step)).pow(2).mean());
      optimizer.step();
    }
  }

  std::string save() {
    const c10::IValue state = ddp.state();
    std::string file;
    if (test_world().rank() == 0) {
      c10::impl::GenericDict all(c10::StringType::get(), c10::AnyType::get());
      all.insert("model", lockstep::dict_of(lockstep::state_dict(net)));
      all.insert("optimizer", lockstep::state_dict(optimizer));
      all.insert("ddp", state);
      file = lockstep::pickle_state(all);
    }
    return shared_comm().broadcast_bytes(file, 0);
  }

  void load(const std::string& file) {
    const auto all = lockstep::unpickle_state(file, "the test").toGenericDict();
    lockstep::load_state_dict(net, all.at("model"));
    lockstep::load_state_dict(optimizer, all.at("optimizer"));
    ddp.load_state(all.at("ddp"));
  }

  Net net;
  lockstep::SGD optimizer{net->parameters(), {.lr = 0.1, .momentum = 0.9}};
  DistributedDataParallel<Net, TestedComm, Hook> ddp;
};

template <class Hook = AllReduceHook>
void check_resumes(
    const DdpOptions& options, const std::function<Hook()>& hook = [] { return Hook{}; }) {
  torch::manual_seed(3);
  Run<Hook> undisturbed(options, hook());
  std::vector<std::string> files{undisturbed.save()};
  for (int step = 0; step < steps; ++step) {
    undisturbed.train(step, step + 1);
    files.push_back(undisturbed.save());
  }
  const auto same = [&](const Run<Hook>& run) {
    for (std::size_t i = 0; i < run.net->parameters().size(); ++i)
      CHECK(run.net->parameters()[i].equal(undisturbed.net->parameters()[i]));
    CHECK(run.ddp.buckets() == undisturbed.ddp.buckets());
  };
  torch::manual_seed(3);
  Run<Hook> never_saved(options, hook());
  never_saved.train(0, steps);
  same(never_saved);
  for (int saved = 0; saved < steps; ++saved)
    for (const int trained : {0, 3}) {  // before it loads; after three steps the buckets are rebuilt
      CAPTURE(saved, trained);
      Run<Hook> resumed(options, hook());
      resumed.train(0, trained);
      resumed.load(files[static_cast<std::size_t>(saved)]);
      resumed.train(saved, steps);
      same(resumed);
    }
}

}  // namespace

TEST_CASE("a loop by hand resumes to the same bits after every step") {
  DdpOptions options = small_buckets();
  SECTION("with each storage of gradients") {
    options.gradients = GENERATE(GradientStorage::in_bucket, GradientStorage::gradient_as_bucket_view,
                                 GradientStorage::separate);
    check_resumes(options);
  }
  SECTION("with a static graph") {
    options.static_graph = true;
    check_resumes(options);
  }
  SECTION("with a search for unused parameters") {
    options.find_unused_parameters = true;
    check_resumes(options);
  }
  SECTION("with a hook that has state of each rank") {
    check_resumes<lockstep::PowerSgdHook>(
        options, [] { return lockstep::PowerSgdHook({.start_iteration = 2, .min_compression_rate = 0.5}); });
  }
}

TEST_CASE("a hook is told the number of the run's reductions, also of those before it was resumed") {
  std::vector<std::int64_t> seen;
  const auto hook = [&] {
    return lockstep::hook_of([&](auto& comm, const lockstep::GradientBucket& bucket) {
      if (bucket.index == 0) seen.push_back(bucket.iteration);
      return comm.all_reduce(bucket.flat);
    });
  };
  using Hook = decltype(hook());
  Run<Hook> first(small_buckets(), hook());
  first.train(0, 3);
  Run<Hook> resumed(small_buckets(), hook());
  resumed.load(first.save());
  resumed.train(3, 5);
  CHECK(seen == std::vector<std::int64_t>{0, 1, 2, 3, 4});
}

TEST_CASE("a state whose hook refuses its part leaves the wrapper as it was") {
  const auto hook = [] {
    return lockstep::PowerSgdHook({.start_iteration = 2, .min_compression_rate = 0.5});
  };
  Run<lockstep::PowerSgdHook> saving(small_buckets(), hook());
  saving.train(0, 3);
  const auto state = lockstep::unpickle_state(saving.save(), "the test").toGenericDict().at("ddp");
  for (const auto& part : state.toGenericDict().at("ranks").toList())
    static_cast<c10::IValue>(part).toGenericDict().at("hook").toGenericDict().insert_or_assign(
        "counters", torch::tensor({-1}));
  for (const int trained : {0, 1, 4}) {  // before the buckets are rebuilt, when they are due, and later
    CAPTURE(trained);
    Run<lockstep::PowerSgdHook> run(small_buckets(), hook());
    run.train(0, trained);
    const auto buckets = run.ddp.buckets();
    const std::string before = run.save();
    CHECK_THROWS_AS(run.ddp.load_state(state), CheckpointError);
    CHECK(run.ddp.buckets() == buckets);
    CHECK(run.save() == before);
  }
}

TEST_CASE("a state that is damaged or of another model is refused") {
  Run<AllReduceHook> run(small_buckets());
  run.train(0, 2);
  const c10::IValue state = run.ddp.state();
  run.ddp.load_state({});
  if (test_world().rank() != 0) {
    CHECK(state.isNone());
    return;
  }
  const auto refused = [&](const char* key, const c10::IValue& value, const char* words) {
    const auto changed = state.toGenericDict().copy();
    changed.insert_or_assign(key, value);
    refuses<CheckpointError>([&] { run.ddp.load_state(changed); }, words);
  };
  CHECK_THROWS_AS(run.ddp.load_state(c10::IValue(3)), CheckpointError);
  refused("order", torch::tensor({1, 0}), "has 2 parameters and the model trains 6");
  refused("order", torch::tensor({-1, 0, 1, 2, 3, 4}), "is damaged");
  refused("order", torch::tensor({0, 0, 1, 2, 3, 4}), "has 6 parameters");
  refused("backwards", -1, "is damaged");
  refused("rebuilt", 1, "is damaged");
  refused("ranks", c10::IValue(), "is damaged");
}

}  // namespace state_ranks_test
