// The same training on c10d::Reducer, the engine of Python's DistributedDataParallel, driven from C++ as the
// Python class drives it. Only the rendezvous is lockstep's.
#include "common.hpp"
#include "lockstep/comm/gloo_comm.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace {

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const lockstep::World& world) {
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::minutes(5));
  options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  auto store = c10::make_intrusive<c10d::PrefixStore>("reducer", world.store());
  auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, world.rank(), world.size(), options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, world.rank(), world.size());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  return group;
}

constexpr std::int64_t first_cap = 1 << 20, cap = 25 << 20;

// The constructor grew over LibTorch's versions.
template <class R, class... Common>
std::unique_ptr<R> make_reducer(Common... common) {
  if constexpr (std::is_constructible_v<R, Common..., bool, bool, std::vector<std::int64_t>>)
    return std::make_unique<R>(common..., false, false, std::vector<std::int64_t>{first_cap, cap});
  else if constexpr (std::is_constructible_v<R, Common..., bool, bool>)
    return std::make_unique<R>(common..., false, false);
  else
    return std::make_unique<R>(common...);
}

class Peer {
 public:
  Peer(const torch::nn::Module& model, c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)), buffers_(model.buffers()) {
    const auto parameters = model.parameters();
    auto everything = parameters;
    everything.insert(everything.end(), buffers_.begin(), buffers_.end());
    {
      const torch::NoGradGuard no_grad;
      c10d::broadcast_coalesced(group_, everything, 250 << 20, 0);
    }
    const std::vector<bool> dense(parameters.size(), false);
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
        parameters, {static_cast<std::size_t>(first_cap), static_cast<std::size_t>(cap)}, dense));
    std::reverse(buckets.begin(), buckets.end());
    std::unordered_map<std::size_t, std::string> names;
    for (const auto& parameter : model.named_parameters()) names.emplace(names.size(), parameter.key());
    reducer_ =
        make_reducer<c10d::Reducer>(parameters, buckets, group_, dense, cap, false, false, names, first_cap);
  }

  void before_forward() {
    reducer_->prepare_for_forward();
    reducer_->rebuild_buckets();
    if (!buffers_.empty()) c10d::broadcast_coalesced(group_, buffers_, 250 << 20, 0);
  }
  void before_backward() { reducer_->prepare_for_backward({}); }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<at::Tensor> buffers_;
  std::unique_ptr<c10d::Reducer> reducer_;
};

}  // namespace

int main(int argc, char** argv) {
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    const auto group = make_group(world);
    bench::measure(world, bench::settings(argc, argv), [&](auto model, auto loss, double rate) {
      auto peer = std::make_shared<Peer>(*model, group);
      auto optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), rate);
      return [=](const auto& data, const auto& target) mutable {
        peer->before_forward();
        auto out = model(data);
        peer->before_backward();
        auto value = loss(out, target);
        optimizer->zero_grad();
        value.backward();
        optimizer->step();
      };
    });
  });
}
