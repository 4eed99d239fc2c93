// The training that is measured, in lockstep.
#include "common.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/data/cache.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"

namespace {

template <class Model>
struct Training {
  Training(Model given, lockstep::GlooComm& comm, double rate)
      : model(given), ddp(model, comm), optimizer(ddp.parameters(), rate) {}

  Model model;
  lockstep::DistributedDataParallel<Model, lockstep::GlooComm> ddp;
  torch::optim::SGD optimizer;
};

// 8,000 digits for machines without real ones.
void draw(const std::filesystem::path& folder) {
  lockstep::make_folder_whole(folder, [](const std::filesystem::path& part) {
    const auto write = [&](const std::string& name, const lockstep::Digits& digits) {
      lockstep::write_idx(part / (name + "-images-idx3-ubyte"), digits.images);
      lockstep::write_idx(part / (name + "-labels-idx1-ubyte"), digits.labels);
    };
    write("train", lockstep::draw_digits(8000, 1));
    write("t10k", lockstep::draw_digits(2000, 2));
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string_view(argv[1]) == "draw") {
    draw(argv[2]);
    return 0;
  }
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    lockstep::GlooComm comm{world};
    bench::measure(world, bench::settings(argc, argv), [&](auto model, auto loss, double rate) {
      auto training = std::make_shared<Training<decltype(model)>>(model, comm, rate);
      return [training, loss](const auto& data, const auto& target) {
        auto value = loss(training->ddp(data), target);
        training->optimizer.zero_grad();
        training->ddp.backward(value);
        training->optimizer.step();
      };
    });
    comm.shutdown();
  });
}
