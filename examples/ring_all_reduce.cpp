// All-reduce written by hand from send and recv: the ring algorithm. PyTorch's tutorial "Writing Distributed
// Applications with PyTorch" passes whole tensors around its ring, n - 1 of them from each rank, and leaves
// it as an exercise to cut them into chunks. With n chunks, each rank sends 2 (n - 1) / n of the tensor.
//   ring_all_reduce --nproc 4 --elements 1000000          starts four processes itself
//   torchrun --no-python --nproc-per-node 4 ring_all_reduce, srun -n 4 and mpirun -n 4 do as well
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/cli.hpp"
#include "lockstep/lockstep.hpp"

/// Replaces `tensor`, contiguous and of equal shape and dtype on every rank, by its sum over the ranks.
/// Returns the number of bytes that this rank has sent.
template <lockstep::PointToPoint Comm>
std::int64_t ring_all_reduce(Comm& comm, const torch::Tensor& tensor) {
  const int size = comm.size(), rank = comm.rank();
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  // n views of the tensor. The first ones have one element more where n does not divide the length.
  const std::vector<torch::Tensor> chunks = tensor.view(-1).tensor_split(size);
  const auto chunk = [&](int index) { return chunks[static_cast<std::size_t>((index + 2 * size) % size)]; };
  std::int64_t bytes = 0;
  // Each step sends one chunk to the next rank and receives another one from the previous rank at the same
  // time. If every rank waited for its send first, none would receive.
  const auto exchange = [&](const torch::Tensor& sent, const torch::Tensor& received) {
    auto sending = comm.send(sent, next);
    comm.recv(received, previous).synchronize();
    sending.synchronize();
    bytes += static_cast<std::int64_t>(sent.nbytes());
  };

  // Reduce-scatter: chunk c starts at rank c and travels once around the ring, and each rank adds its own
  // values. After n - 1 steps rank r holds the sum of chunk r + 1.
  for (int step = 0; step < size - 1; ++step) {
    const auto received = torch::empty_like(chunk(rank - step - 1));
    exchange(chunk(rank - step), received);
    chunk(rank - step - 1).add_(received);
  }
  // All-gather: the finished chunks travel once more around the ring, and each rank keeps a copy.
  for (int step = 0; step < size - 1; ++step) exchange(chunk(rank + 1 - step), chunk(rank - step));
  return bytes;
}

void run(const lockstep::World& world, std::int64_t elements) {
  // Messages of CPU tensors. NCCL's send and recv would have to be grouped, since both wait in one stream.
  lockstep::CpuComm comm{world};
  torch::manual_seed(1 + static_cast<std::uint64_t>(world.rank()));
  const auto ring = torch::randn({elements}), reference = ring.clone();

  const std::int64_t bytes = ring_all_reduce(comm, ring);
  comm.all_reduce(reference).synchronize();

  // The order of the additions differs from chunk to chunk and may differ from Gloo's, hence a tolerance.
  // Every chunk is summed on one rank and copied to the others, hence none between the ranks.
  if (!torch::allclose(ring, reference, /*rtol=*/1e-5, /*atol=*/1e-5))
    throw lockstep::MismatchError("the ring's sum differs from all_reduce's");
  lockstep::check_same_parameters(comm, {{"the ring's sum", ring}}, /*tolerance=*/0);

  const auto whole = static_cast<double>(ring.nbytes());
  world.log.all().info("sent {} bytes: {:.4f} of the tensor's {}", bytes, static_cast<double>(bytes) / whole,
                       ring.nbytes());
  comm.barrier();
  world.log.info("{} ranks: the sums equal all_reduce's; 2 (n - 1) / n = {:.4f}", comm.size(),
                 2.0 * (comm.size() - 1) / comm.size());
}

int main(int argc, char** argv) {
  lockstep::CommandLine app("Sums a tensor over several processes by a ring of sends and receives.");
  std::int64_t elements = 1'000'000;
  app.add_option("--elements", elements, "length of the tensor of float32")
      ->check(CLI::Range(1, 100'000'000));
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) { run(world, elements); });
}
