// Prints, for each configuration read from stdin, what the samplers and the loader give: int64 numbers in the
// machine's byte order, a count before each list. sampler_parity.py compares them with Python's.
#include <torch/torch.h>

#include <cstdio>
#include <iostream>

#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/data/weighted_random_sampler.hpp"
#include "lockstep/detail/const_data.hpp"

namespace {

void print(const std::vector<std::int64_t>& numbers) {
  const auto count = static_cast<std::int64_t>(numbers.size());
  std::fwrite(&count, sizeof count, 1, stdout);
  std::fwrite(numbers.data(), sizeof count, numbers.size(), stdout);
}

// What the default generator would give next: equal only if it was drawn from as often as Python's.
std::int64_t default_draw() {
  return torch::randint(1 << 30, {1}, torch::kLong).item<std::int64_t>();
}

lockstep::TensorDataset counting(std::size_t length) {
  const at::Tensor numbers = torch::arange(static_cast<std::int64_t>(length));
  return {numbers, numbers};
}

// The passes of a loader: each batch's length and samples, then a draw.
template <class Loader>
void print_passes(Loader& loader, std::size_t epochs, bool set_epoch) {
  for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
    if (set_epoch) loader.set_epoch(epoch);
    std::vector<std::int64_t> numbers{static_cast<std::int64_t>(loader.size())};
    for (const auto& batch : loader) {
      numbers.push_back(batch.data.size(0));
      const std::int64_t* samples = batch.data.template data_ptr<std::int64_t>();
      numbers.insert(numbers.end(), samples, samples + batch.data.size(0));
    }
    numbers.push_back(default_draw());
    print(numbers);
  }
}

}  // namespace

int main() {
  std::string kind;
  while (std::cin >> kind) {
    std::size_t length = 0, epochs = 0, epoch = 0;
    std::int64_t batch = 0, workers = 0;
    std::uint64_t seed = 0;
    int world = 0;
    bool shuffle = false, drop_last = false, own_generator = false;
    if (kind == "sampler") {
      std::cin >> length >> world >> seed >> epoch >> shuffle >> drop_last >> batch;
      for (int rank = 0; rank < world; ++rank) {
        lockstep::DistributedSampler sampler{
            length, rank, world, {.seed = seed, .shuffle = shuffle, .drop_last = drop_last}};
        if (epoch != 0) sampler.set_epoch(epoch);
        sampler.reset();
        std::vector<std::int64_t> numbers{static_cast<std::int64_t>(sampler.size())};
        while (const auto indices = sampler.next(static_cast<std::size_t>(batch)))
          numbers.insert(numbers.end(), indices->begin(), indices->end());
        print(numbers);
      }
    } else if (kind == "random") {
      std::cin >> length >> seed >> epochs >> batch >> drop_last >> workers >> own_generator;
      torch::manual_seed(seed);
      lockstep::RandomSamplerOptions options;
      if (own_generator) options.generator = at::make_generator<at::CPUGeneratorImpl>(seed + 1);
      lockstep::DataLoader loader{counting(length),
                                  lockstep::RandomSampler{length, options},
                                  {.batch_size = batch, .num_workers = workers, .drop_last = drop_last}};
      print_passes(loader, epochs, false);
    } else if (kind == "loader") {
      int rank = 0;
      std::cin >> length >> world >> rank >> seed >> epochs >> batch >> drop_last >> workers;
      torch::manual_seed(seed);
      lockstep::DataLoader loader{counting(length),
                                  lockstep::DistributedSampler{length, rank, world, {.seed = seed}},
                                  {.batch_size = batch, .num_workers = workers, .drop_last = drop_last}};
      print_passes(loader, epochs, true);
    } else if (kind == "weighted") {
      bool replacement = false;
      std::cin >> length >> batch >> world >> seed >> epoch >> replacement;
      const auto weights =
          (torch::arange(static_cast<std::int64_t>(length)) * 7 % 11 + 1).to(torch::kDouble) / 8;
      for (int rank = 0; rank < world; ++rank) {
        lockstep::WeightedRandomSampler sampler{
            weights, static_cast<std::size_t>(batch), rank, world, {.seed = seed}, replacement};
        sampler.set_epoch(epoch);
        sampler.reset();
        const auto indices = sampler.next(batch).value();
        print({indices.begin(), indices.end()});
      }
    } else {
      std::fprintf(stderr, "unknown kind %s\n", kind.c_str());
      return 2;
    }
  }
  return 0;
}
