// Backwards whose buckets the host checks one reduction later, as on GPUs.
#include "support/late_check.hpp"

#include "grad/models.hpp"

namespace late_check_ranks_test {

using lockstep::DistributedDataParallel;
using lockstep::GradientError;
using lockstep::PeerError;
using lockstep_test::LateComm;

namespace {

LateComm& late_comm() {
  static LateComm comm{test_world()};
  return comm;
}

int culprit() {
  return test_world().size() - 1;
}
bool am_culprit() {
  return test_world().rank() == culprit();
}

/// A model of its own on every rank, whose steps a test takes.
struct Training {
  explicit Training(lockstep::DdpOptions options = small_buckets()) : ddp{net, late_comm(), options} {}

  torch::Tensor loss(int step) { return net(batch_of(test_world().rank(), step)).pow(2).mean(); }
  /// A loss whose backward throws on the last rank.
  torch::Tensor failing_loss(int step) { return am_culprit() ? throwing(loss(step)) : loss(step); }
  void good_step(int step) {
    const auto expected = expected_gradients(net, test_world().size(), [&](Net& model, int rank) {
      return model(batch_of(rank, step)).pow(2).mean();
    });
    net->zero_grad();
    ddp.backward(loss(step));
    check_close(gradients(net->parameters()), expected);
    optimizer.step();
  }
  void good_steps(int number) {
    for (int step = 0; step < number; ++step) good_step(step);
  }
  /// A backward that fails on the last rank, which catches the error. The others step.
  void failed_step() {
    net->zero_grad();
    if (am_culprit()) {
      CHECK_THROWS_AS(ddp.backward(failing_loss(50)), Thrown);
      for (const auto& parameter : ddp.parameters()) CHECK_FALSE(parameter.grad().defined());
    } else {
      ddp.backward(failing_loss(50));
      CHECK(net->three->bias.grad().isnan().any().item<bool>());
    }
    optimizer.step();
    CHECK(net->three->bias.isnan().any().item<bool>() == !am_culprit());
  }
  void restore() {
    torch::manual_seed(3);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.uniform_(-0.5, 0.5);
  }

  Net net;
  DistributedDataParallel<Net, LateComm> ddp;
  torch::optim::SGD optimizer{net->parameters(), 0.01};
};

/// Checks that `work` throws what the last rank's failure is to each rank: that itself, and PeerError on the others.
template <class Work>
void throws_at_once(Work&& work) {
  if (am_culprit())
    CHECK_THROWS_AS(work(), Thrown);
  else
    CHECK_THROWS_AS(work(), PeerError);
}

/// Checks that `work` throws one text on all ranks, PeerError on those that did not fail.
template <class Work>
void throws_late(Work&& work, const std::string& words) {
  const std::string text = am_culprit() ? text_of<GradientError>(work) : text_of<PeerError>(work);
  CHECK_THAT(text, ContainsSubstring(words));
  for (const std::string& other : late_comm().all_gather_bytes(text)) CHECK(other == text);
}

}  // namespace

TEST_CASE("a backward returns before its buckets are checked, from the second one on") {
  Training training;
  const bool alone = test_world().size() == 1;
  for (int step = 0; step < 4; ++step) {
    training.good_step(step);
    CHECK(training.ddp.checks_late() == (!alone && step > 0));
  }
  training.ddp.synchronize();
  training.ddp.synchronize();
}

TEST_CASE("a backward that fails throws on its rank, and on the others at the end of their next one",
          "[2+]") {
  Training training;
  const int before = GENERATE(1, 3);
  CAPTURE(before);
  training.good_steps(before == 1 ? 1 : 3);
  training.failed_step();
  training.net->zero_grad();
  throws_late([&] { training.ddp.backward(training.loss(51)); },
              fmt::format("backward threw on rank {}: thrown inside backward; found after backward {} had "
                          "returned",
                          culprit(), before + 1));
  for (const auto& parameter : training.ddp.parameters()) CHECK_FALSE(parameter.grad().defined());
  training.restore();
  training.good_steps(3);
  training.ddp.synchronize();
}

TEST_CASE("a backward that fails after its last gradient is found late, too", "[2+]") {
  Training training;
  training.good_steps(3);
  training.net->zero_grad();
  const auto input = batch_of(test_world().rank(), 50).requires_grad_();
  const auto work = [&] {
    training.ddp.backward(training.net(am_culprit() ? throwing(input) : input).pow(2).mean());
  };
  if (am_culprit())
    CHECK_THROWS_AS(work(), Thrown);
  else
    work();
  throws_late([&] { training.ddp.synchronize(); }, "thrown inside backward");
}

TEST_CASE("a first backward that fails is found at once, before the ranks order their buckets", "[2+]") {
  Training training;
  CHECK_FALSE(training.ddp.checks_late());
  throws_at_once([&] { training.ddp.backward(training.failing_loss(0)); });
  for (const auto& parameter : training.ddp.parameters()) CHECK_FALSE(parameter.grad().defined());
  training.good_steps(3);
}

TEST_CASE("synchronize throws what the next backward would throw, once", "[2+]") {
  Training training;
  training.good_steps(2);
  training.failed_step();
  throws_late([&] { training.ddp.synchronize(); }, "found after backward 3 had returned");
  training.ddp.synchronize();
  training.restore();
  training.good_steps(2);
}

TEST_CASE("a rank that cannot come to its backward tells the others late, too", "[2+]") {
  Training training;
  training.good_steps(2);
  if (am_culprit())
    training.ddp.fail_backward(std::make_exception_ptr(lockstep::DataError("no picture 17")));
  else
    training.ddp.backward(training.loss(9));
  throws_late([&] { training.ddp.synchronize(); }, "no picture 17");
  training.good_steps(2);
}

TEST_CASE("a parameter without a gradient is an error on its rank at once, which names it, then on all",
          "[2+]") {
  Training training;
  training.good_steps(2);
  training.net->zero_grad();
  training.net->use_two = !am_culprit();
  const auto loss = training.loss(7);
  training.net->use_two = true;
  if (am_culprit())
    refuses<GradientError>([&] { training.ddp.backward(loss); }, "the other ranks throw at the end of");
  else
    CHECK_NOTHROW(training.ddp.backward(loss));
  refuses<GradientError>(
      [&] { training.ddp.backward(training.loss(8)); },
      fmt::format("undefined on rank {} (parameter 2 'two.weight', parameter 3 'two.bias')", culprit()));
  training.good_steps(2);
}

TEST_CASE("a failure in two backwards in a row is told once", "[2+]") {
  Training training;
  training.good_steps(2);
  training.failed_step();
  training.net->zero_grad();
  CHECK_FALSE(thrown_by([&] { training.ddp.backward(training.failing_loss(60)); }).empty());
  training.ddp.synchronize();
  training.restore();
  training.good_steps(2);
}

TEST_CASE("a rank whose next backward fails too learns of the one before", "[2+]") {
  // 0: in backward; 1: fail_backward, then synchronize; 2: fail_backward, then backward
  const int how = GENERATE(0, 1, 2);
  CAPTURE(how);
  Training training;
  training.good_steps(2);
  training.failed_step();
  training.net->zero_grad();
  const bool mine = test_world().rank() == 0;
  std::string text = thrown_by([&] {
    if (mine && how > 0)
      return training.ddp.fail_backward(std::make_exception_ptr(lockstep::DataError("of rank 0")));
    const auto out = training.loss(60);
    training.ddp.backward(mine ? throwing(out, "of rank 0") : out);
  });
  if (mine && how > 0) {
    CHECK(text.empty());
    if (how == 1) text = thrown_by([&] { training.ddp.synchronize(); });
  } else if (how == 1) {
    training.ddp.synchronize();
  }
  if (how == 2) {
    training.net->zero_grad();
    const std::string next = thrown_by([&] { training.ddp.backward(training.loss(61)); });
    CHECK(next.empty() == !mine);
    if (mine) text = next;
    CHECK_THROWS_AS(training.ddp.synchronize(), lockstep::Error);
  }
  CHECK_THAT(text, ContainsSubstring("thrown inside backward; found after backward 3 had returned"));
  CHECK((text.find("then the next backward threw on this rank: of rank 0") != std::string::npos) == mine);
  training.ddp.synchronize();
  training.restore();
  training.good_steps(2);
}

TEST_CASE("a backward that fails on every rank is told by each rank alone") {
  Training training;
  training.good_steps(2);
  CHECK_THROWS_AS(training.ddp.backward(torch::ones({})), GradientError);
  training.good_steps(3);
  training.ddp.synchronize();
}

TEST_CASE("a gradient that is not a number is no error, late either") {
  Training training;
  training.good_steps(2);
  for (int step = 0; step < 3; ++step) {
    training.net->zero_grad();
    training.ddp.backward(training.loss(step) * (test_world().rank() == 0 ? NAN : 1));
    CHECK(training.net->three->bias.grad().isnan().all().item<bool>());
  }
  training.ddp.synchronize();
  training.good_steps(2);
}

TEST_CASE("reductions that block the host anyway are checked at once", "[2+]") {
  const bool searches = GENERATE(true, false);
  lockstep::DdpOptions options = small_buckets();
  options.find_unused_parameters = searches;
  Training training(options);
  training.good_steps(2);
  training.net->zero_grad();
  throws_at_once([&] {
    if (searches)
      training.ddp.backward(training.failing_loss(3));
    else
      training.ddp.backward_sum(training.failing_loss(3), 5);
  });
  for (const auto& parameter : training.ddp.parameters()) CHECK_FALSE(parameter.grad().defined());
  training.good_steps(2);
}

TEST_CASE("a loss over two models is checked at once, after the first such loss", "[2+]") {
  Training one, other;
  for (int step = 0; step < 3; ++step) {
    one.net->zero_grad();
    other.net->zero_grad();
    one.ddp.backward(one.loss(step) + other.loss(step));
  }
  CHECK_FALSE(one.ddp.checks_late());
  CHECK_FALSE(other.ddp.checks_late());
  throws_at_once([&] { one.ddp.backward(one.failing_loss(4) + other.loss(4)); });
  one.good_steps(2);
  other.good_steps(2);
}

TEST_CASE("a failed loss over two models leaves the ranks with equal ways to check", "[2+]") {
  Training one, other;
  const auto second = other.loss(1);  // made first, so that the backward reaches it last
  throws_at_once([&] { one.ddp.backward(one.failing_loss(1) + second); });
  one.good_steps(3);
  other.good_steps(3);
  CHECK(one.ddp.checks_late());
  CHECK(other.ddp.checks_late());
}

// The last one: it ends with an abort, after which the ranks of this program make no further communicator.
TEST_CASE("a first loss over two models that fails on a rank ends the communicator, and no rank waits",
          "[2+]") {
  LateComm comm{test_world()};
  const auto made = [] {
    torch::manual_seed(1);
    return Net();
  };
  Net first = made(), second = made();
  DistributedDataParallel one{first, comm}, other{second, comm};
  const auto loss = [](Net& net) { return net(batch_of(test_world().rank(), 1)).pow(2).mean(); };
  for (int step = 0; step < 2; ++step) {
    one.backward(loss(first));
    other.backward(loss(second));
    first->zero_grad();
    second->zero_grad();
  }
  const auto begin = std::chrono::steady_clock::now();
  throws_at_once([&] {
    const auto out = loss(first);
    one.backward((am_culprit() ? throwing(out) : out) + loss(second));
    one.synchronize();
  });
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));
}

}  // namespace late_check_ranks_test
