// Parameters that are reduced together, apart from the buckets of the others.
#include <algorithm>

#include "grad/models.hpp"
#include "support/mib.hpp"

namespace delayed_ranks_test {

using lockstep::DdpOptions;
using lockstep::DistributedDataParallel;
using lockstep::detail::BucketPlan;

namespace {

// Parameters of Net: 0 and 1 of layer one, 2 and 3 of layer two, 4 and 5 of layer three.
DdpOptions delaying(std::vector<std::string> names, std::optional<std::string> until = {}) {
  DdpOptions options = small_buckets();
  options.bucket_cap_mb = lockstep_test::mib({1});
  options.delayed = {std::move(names), std::move(until)};
  return options;
}

const auto loss_of = [](Net& net, int rank, int step) { return net(batch_of(rank, step)).pow(2).sum(); };

std::string refusal(const DdpOptions& options) {
  Net net;
  net->two->bias.requires_grad_(false);
  try {
    DistributedDataParallel ddp{net, shared_comm(), options};
  } catch (const lockstep::UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("delayed gradients are averaged in one bucket of their own, in the order of their names") {
  const auto storage = GENERATE(lockstep::GradientStorage::in_bucket, lockstep::GradientStorage::separate,
                                lockstep::GradientStorage::gradient_as_bucket_view);
  const bool keep = GENERATE(false, true);
  torch::manual_seed(3);
  Net net;
  DdpOptions options = delaying({"three.weight", "two.bias", "three.bias"}, "two.weight");
  options.gradients = storage;
  DistributedDataParallel ddp{net, shared_comm(), options};
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    const auto expected = expected_gradients(net, test_world().size(),
                                             [&](Net& copy, int rank) { return loss_of(copy, rank, step); });
    net->zero_grad(!keep);
    ddp.backward(loss_of(net, test_world().rank(), step));
    check_close(gradients(net->parameters()), expected);
  }
  // In the order in which gradients come: two.weight's bucket, theirs, and those of layer one.
  const auto plan = ddp.buckets();
  REQUIRE(plan.size() == 4);
  CHECK(plan[0] == std::vector<std::size_t>{2});
  CHECK(plan[1] == std::vector<std::size_t>{4, 3, 5});
}

TEST_CASE("all gradients may be delayed, in the last turn, with counts and without data on a rank") {
  torch::manual_seed(4);
  Net net;
  DistributedDataParallel ddp{
      net, shared_comm(),
      delaying({"one.weight", "one.bias", "two.weight", "two.bias", "three.weight", "three.bias"})};
  const int ranks = test_world().size(), rank = test_world().rank();
  const bool last = ranks > 1 && rank == ranks - 1;
  const auto expected = expected_gradients(net, ranks, [&](Net& copy, int r) {
    const double part = ranks > 1 && r == ranks - 1 ? 0.0 : 1.0;
    return loss_of(copy, r, 0) * part * ranks / (5.0 * std::max(1, ranks - 1));
  });
  net->zero_grad();
  ddp.backward_sum(last ? torch::Tensor() : loss_of(net, rank, 0), last ? 0 : 5);
  check_close(gradients(net->parameters()), expected);
  CHECK(ddp.buckets() == BucketPlan{{0, 1, 2, 3, 4, 5}});
}

TEST_CASE("what cannot be delayed is refused by name") {
  CHECK_THAT(refusal(delaying({"four.weight"})),
             ContainsSubstring("DdpOptions::delayed names 'four.weight', and the model trains no such"));
  CHECK_THAT(refusal(delaying({"two.bias"})), ContainsSubstring("trains no such parameter"));  // frozen
  CHECK_THAT(refusal(delaying({"one.bias", "one.bias"})), ContainsSubstring("names 'one.bias', twice"));
  CHECK_THAT(refusal(delaying({"one.bias"}, "one.bias")), ContainsSubstring("to wait for itself"));
  CHECK_THAT(refusal(delaying({"one.bias"}, "none")), ContainsSubstring("names 'none'"));

  torch::nn::Sequential table(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)),
                              torch::nn::Linear(4, 2));
  CHECK_THROWS_WITH((DistributedDataParallel{table, shared_comm(), delaying({"0.weight"})}),
                    ContainsSubstring("whose gradient is sparse"));
}

TEST_CASE("ranks that delay other parameters are told so on every rank", "[2+]") {
  Net net;
  const bool odd = test_world().rank() == 1;
  const std::string text = thrown_by([&] {
    DistributedDataParallel ddp{
        net, shared_comm(),
        delaying({"one.bias"}, odd ? std::optional<std::string>("two.bias") : std::nullopt)};
  });
  CHECK_THAT(text, ContainsSubstring("delayed.until is not set on rank") &&
                       ContainsSubstring("'two.bias' on rank 1"));
}

}  // namespace delayed_ranks_test
