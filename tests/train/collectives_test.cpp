// Exact weights cost no collective: a step makes those of its buckets and no other.
#include "lockstep/comm/gloo_comm.hpp"
#include "support/ranks.hpp"
#include "train/regression.hpp"

namespace collectives_test {

namespace {

int collectives = 0;

// Counts what training can call.
class CountedGloo : public lockstep::GlooComm {
 public:
  using GlooComm::GlooComm;
  template <class Tensors>
  Work all_reduce(const Tensors& tensors, lockstep::ReduceOp op = lockstep::ReduceOp::sum) {
    ++collectives;
    return GlooComm::all_reduce(tensors, op);
  }
  template <class Tensors>
  Work broadcast(const Tensors& tensors, int root = 0) {
    ++collectives;
    return GlooComm::broadcast(tensors, root);
  }
  template <class Tensors>
  Work all_gather(const Tensors& output, const Tensors& input) {
    ++collectives;
    return GlooComm::all_gather(output, input);
  }
  std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    ++collectives;
    return GlooComm::all_gather_bytes(bytes);
  }
  std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    ++collectives;
    return GlooComm::broadcast_bytes(bytes, root);
  }
  Work all_gather_bytes_async(std::vector<std::string>& all, std::string bytes) {
    ++collectives;
    return GlooComm::all_gather_bytes_async(all, std::move(bytes));
  }
  void barrier() {
    ++collectives;
    GlooComm::barrier();
  }
};

// Of a run of so many steps, the last of them rank 0's alone.
template <class Loss>
int collectives_of(std::int64_t steps, Loss&& loss) {
  const lockstep::TrainerOptions options{.batch_size = 2, .accumulate = 2, .pad = false, .progress = false};
  lockstep::Trainer<torch::nn::Sequential, lockstep::DistributedSampler, CountedGloo, lockstep::Fp32> trainer{
      test_world(), options, tanh_network(1, 3, 5)};
  collectives = 0;
  const auto report = trainer.fit(curve((steps - 1) * 4 * test_world().size() + 1), loss);
  CHECK(report.step == steps);
  return collectives;
}

}  // namespace

TEST_CASE("a step of uneven shares and micro-batches makes one collective for its one bucket") {
  CHECK(collectives_of(8, squared_error) - collectives_of(4, squared_error) == 4);
  const auto sum = [](auto& net, const auto& batch) {
    return lockstep::Mean{torch::mse_loss(net->forward(batch.data), batch.target, torch::Reduction::Sum),
                          batch.data.size(0)};
  };
  CHECK(collectives_of(8, sum) - collectives_of(4, sum) == 4);
}

}  // namespace collectives_test
