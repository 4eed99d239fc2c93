// Losses with named parts.
#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>

#include "lockstep/train/trainer.hpp"
#include "support/ranks.hpp"
#include "train/common_folder.hpp"
#include "train/regression.hpp"

namespace loss_parts_ranks_test {

namespace {

using lockstep::named;

const auto in_parts = [](auto& net, const auto& batch) {
  const auto fit = squared_error(net, batch);
  const auto size = net->forward(batch.data).pow(2);
  return std::tuple{fit + 0.1 * size.mean(), named<"fit">(fit),
                    named<"size">(lockstep::Mean{size.sum(), size.numel()})};
};
const auto whole = [](auto& net, const auto& batch) { return std::get<0>(in_parts(net, batch)); };

lockstep::TrainerOptions options() {
  return {
      .epochs = 2, .batch_size = 3, .accumulate = 2, .lr = 0.05, .seed = 4, .pad = false, .progress = false};
}
std::map<std::string, double> means(const lockstep::EpochReport& report) {
  std::map<std::string, double> all;
  for (const auto& [name, total] : report.losses) all[std::string(name)] = total.mean();
  return all;
}

}  // namespace

TEST_CASE("the named parts of a loss are means over all samples and ranks, and change no bit") {
  const auto& world = test_world();
  const auto data = curve(7 * world.size() + 1);
  lockstep::Trainer with(world, options(), tanh_network(1, 4, 7)),
      without(world, options(), tanh_network(1, 4, 7));
  const auto report = with.fit(data, in_parts), other = without.fit(data, whole);
  CHECK(report.loss == other.loss);
  CHECK(other.losses.empty());
  CHECK(distance(with.model(), without.model()) == 0);
  REQUIRE(report.losses.size() == 2);
  CHECK(report.losses[0].first == "fit");
  CHECK(report.losses[0].second.count == 7 * world.size() + 1);
  const auto parts = means(report);
  CHECK(report.loss == Approx(parts.at("fit") + 0.1 * parts.at("size")));
}

TEST_CASE("the named parts of a resumed epoch are those of the whole epoch") {
  const auto& world = test_world();
  const auto data = curve(18 * world.size());
  CommonFolder folder(world);
  lockstep::Trainer first(world, options(), tanh_network(1, 4, 7)),
      second(world, options(), tanh_network(1, 4, 8));
  const auto save = [&](const lockstep::StepReport& report) {
    if (report.step == 4) first.save_checkpoint(folder / "run.pt");
  };
  const auto expected = first.fit(data, in_parts, lockstep::OnStep{save});
  second.load_checkpoint(folder / "run.pt");
  CHECK(means(second.fit(data, in_parts)) == means(expected));
}

}  // namespace loss_parts_ranks_test
