// Ranks of mpirun or mpiexec over MpiComm. The first argument says what they do, and who initializes MPI.
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "lockstep/comm/mpi_comm.hpp"
#include "lockstep/comm/shm_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/world/launch.hpp"

namespace {

using lockstep::MpiComm;
using lockstep::ReduceOp;
using lockstep::World;
using Tensors = std::vector<at::Tensor>;

void check(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("not as expected: " + what);
}
void check_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  check(found.scalar_type() == expected.scalar_type() && at::equal(found, expected), what);
}

// The tensor of a rank: values that every dtype adds and multiplies exactly.
at::Tensor values_of(int rank, at::ScalarType type, std::int64_t length = 1000) {
  if (type == at::kBool) return (at::arange(length).add(rank) % 3 == 0);
  return (at::arange(length).add(rank) % 3).add(type == at::kByte ? 0 : -1).to(type);
}
at::Tensor reduced(const Tensors& all, ReduceOp op) {
  at::Tensor result = all[0].clone();
  const bool logical = result.scalar_type() == at::kBool;
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (op == ReduceOp::min || (logical && op == ReduceOp::product))
      result = at::minimum(result, all[i]);
    else if (op == ReduceOp::max || logical)
      result = at::maximum(result, all[i]);
    else
      result = op == ReduceOp::product ? result * all[i] : result + all[i];
  }
  return op == ReduceOp::avg ? result / static_cast<std::int64_t>(all.size()) : result;
}

void check_reductions(MpiComm& comm) {
  const int size = comm.size(), last = size - 1;
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kInt,
                          at::kLong, at::kBool})
    for (const auto op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
      if (op == ReduceOp::avg && !c10::isFloatingType(type)) continue;
      const std::string what = std::string(c10::toString(type)) + " " + std::to_string(static_cast<int>(op));
      Tensors all;
      for (int rank = 0; rank < size; ++rank) all.push_back(values_of(rank, type));
      const at::Tensor expected = reduced(all, op);
      at::Tensor own = values_of(comm.rank(), type), at_last = own.clone();
      auto first = comm.all_reduce(own, op), second = comm.reduce(at_last, last, op);
      second.wait();
      first.wait();
      check_equal(own, expected, "all_reduce " + what);
      if (comm.rank() == last) check_equal(at_last, expected, "reduce " + what);
      const at::Tensor rows =
          at::stack(Tensors(static_cast<std::size_t>(size), values_of(comm.rank(), type)));
      at::Tensor row = at::empty_like(own);
      comm.reduce_scatter(row, rows, op).wait();
      check_equal(row, expected, "reduce_scatter " + what);
    }
}

void check_movements(MpiComm& comm) {
  const int rank = comm.rank(), size = comm.size();
  for (const auto type : {at::kFloat, at::kComplexDouble, at::kBool, at::kShort}) {
    const auto row = [&](int from, int to) { return at::full({3, 5}, from * size + to).to(type); };
    at::Tensor sent = row(size - 1, rank);
    comm.broadcast(sent, size - 1).wait();
    check_equal(sent, row(size - 1, size - 1), "broadcast");
    Tensors in, out, gathered;
    for (int other = 0; other < size; ++other) {
      in.push_back(row(rank, other));
      out.push_back(row(other, rank));
      gathered.push_back(row(other, 7));
    }
    at::Tensor all = at::empty({size, 3, 5}, in[0].options());
    comm.all_gather(all, row(rank, 7)).wait();
    check_equal(all, at::stack(gathered), "all_gather");
    comm.all_to_all(all, at::stack(in)).wait();
    check_equal(all, at::stack(out), "all_to_all");
    for (int other = 0; other < size; ++other) {
      if (other == rank) continue;
      at::Tensor received = at::empty({5, 3}, in[0].options()).t();
      auto sending = comm.send(in[static_cast<std::size_t>(other)], other, 3);
      comm.recv(received, other, 3).wait();
      sending.wait();
      check_equal(received, row(other, rank), "recv");
    }
  }
  const auto texts = comm.all_gather_bytes(std::string(static_cast<std::size_t>(100 * rank), 'x'));
  for (int other = 0; other < size; ++other)
    check(texts[static_cast<std::size_t>(other)].size() == static_cast<std::size_t>(100 * other),
          "all_gather_bytes");
  check(comm.broadcast_bytes("of " + std::to_string(rank), size - 1) == "of " + std::to_string(size - 1),
        "bytes");
  comm.barrier();
}

// The operations of the backend in pieces of 64 bytes.
void check_backend(const World& world, MPI_Comm comm) {
  using namespace lockstep::detail;
  const int rank = world.rank(), size = world.size(), last = size - 1;
  const c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<MpiBackend>(duplicate(comm, std::chrono::seconds(60)), rank, size, 64);
  const auto wait = [](const MpiBackend::WorkPtr& work) { work->wait(); };
  const auto row = [&](int of) { return at::arange(50).add(100 * of); };
  Tensors own{row(rank)}, rows(static_cast<std::size_t>(size));
  at::Tensor all = at::empty({size, 50}, at::kLong), sum = at::arange(50) * size + 100 * (size * last / 2);
  Tensors all_rows;
  for (int of = 0; of < size; ++of) all_rows.push_back(row(of));
  for (at::Tensor& each : rows) each = at::zeros({50}, at::kLong);
  std::vector<Tensors> lists{rows};
  wait(backend->allgather(lists, own));
  check_equal(at::stack(rows), at::stack(all_rows), "pieces of allgather");
  wait(backend->_allgather_base(all, own[0]));
  check_equal(all, at::stack(all_rows), "pieces of _allgather_base");
  at::Tensor repeated = row(rank).repeat({size}), received_rows = at::empty_like(repeated);
  all_to_all_single(*backend, received_rows, repeated)->wait();
  check_equal(received_rows.view({size, -1}), at::stack(all_rows), "pieces of an all-to-all");
  std::vector<Tensors> gathered, scattered, parts{all_rows};
  if (rank == last) gathered = {Tensors(all.zero_().unbind(0))}, scattered = {all_rows};
  wait(backend->gather(gathered, own, {.rootRank = last}));
  if (rank == last) check_equal(all, at::stack(all_rows), "gather");
  Tensors output{at::zeros({50}, at::kLong)};
  wait(backend->scatter(output, scattered, {.rootRank = last}));
  check_equal(output[0], own[0], "scatter");
  wait(backend->reduce_scatter(output, parts, {}));
  check_equal(output[0], own[0] * size, "reduce_scatter");
  reduce_scatter_single(*backend, output[0].zero_(), repeated = at::cat(all_rows),
                        c10d::ReduceScatterOptions{})
      ->wait();
  check_equal(output[0], own[0] * size, "reduce_scatter of one tensor");
  Tensors uneven, expected, received;  // rank s sends (s + 2 r) % 3 numbers to rank r
  for (int of = 0; of < size; ++of) {
    uneven.push_back(at::full({(rank + 2 * of) % 3 * 30}, rank));
    expected.push_back(at::full({(of + 2 * rank) % 3 * 30}, of));
    received.push_back(at::zeros_like(expected.back()));
  }
  wait(backend->alltoall(received, uneven));
  check_equal(at::cat(received), at::cat(expected), "an uneven all-to-all");
  Tensors reduced{row(rank)};
  wait(backend->allreduce(reduced, {}));
  check_equal(reduced[0], sum, "pieces of allreduce");
  if (MpiEngine::get().has_thread()) {  // completes while nobody waits
    const auto work = backend->allreduce(reduced, {});
    for (int i = 0; i < 1000 && !work->isSuccess(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    check(work->isSuccess(), "progress");
  }
  if (size > 1 && rank < 2) {
    Tensors other{at::empty({50}, at::kLong)};
    const auto sending = backend->send(own, 1 - rank, 0), receiving = backend->recv(other, 1 - rank, 0);
    wait(receiving);
    wait(sending);
    check_equal(other[0], row(1 - rank), "pieces of a message");
    Tensors longer{at::empty({56}, at::kLong)};
    const auto sent = backend->send(own, 1 - rank, 1), received = backend->recv(longer, 1 - rank, 1);
    try {
      wait(received);
      check(false, "a message of another size");
    } catch (const OtherOperation&) {
    }
  }
}

void check_training(const World& world, MpiComm& comm) {
  torch::manual_seed(world.rank());
  torch::nn::Linear model(20, 3);
  lockstep::DistributedDataParallel ddp{model, comm};
  const auto input = at::full({4, 20}, 0.25 * (world.rank() + 1));
  const auto before = ddp(input).sum();
  ddp.backward(before);
  const double mean = (world.size() + 1) / 2.0;
  check_equal(model->weight.grad(), at::full({3, 20}, mean), "the gradient");
}

void check_all(const World& world, MPI_Comm of = MPI_COMM_NULL) {
  MpiComm comm(world, {.timeout = std::chrono::seconds(100), .comm = of});
  check_reductions(comm);
  check_movements(comm);
  check_backend(world, lockstep::detail::world_unless_given(of));
  for (int parity : {0, 1}) {
    std::vector<int> members;
    for (int rank = parity; rank < world.size(); rank += 2) members.push_back(rank);
    auto group = comm.new_group(members);
    check(group.has_value() == (world.rank() % 2 == parity), "new_group");
    if (!group) continue;
    at::Tensor one = at::ones({3}) * world.rank();
    group->all_reduce(one).wait();
    double sum = 0;
    for (const int member : members) sum += member;
    check_equal(one, at::full({3}, sum), "all_reduce of a group");
    auto nested = group->new_group({0});
    check(nested.has_value() == (group->rank() == 0), "a group of a group");
  }
  check_training(world, comm);
  comm.shutdown();
}

int initialize(int level) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  return provided;
}

int run(const std::string& mode, const char* const* arguments) {
  if (mode == "all") {
    const World world = lockstep::mpi_world();
    check_all(world);
    if (world.local_size() == world.size() && world.size() > 1) {  // a wait in MPI moves shared memory on
      lockstep::ShmComm shm{world};
      MpiComm mpi{world};
      at::Tensor large = at::full({1 << 20}, world.rank(), at::kFloat);
      auto sent = world.rank() == 0 ? std::optional(shm.send(large, 1)) : std::nullopt;
      if (world.rank() == 1) shm.recv(large, 0).wait();
      mpi.barrier();
      check(world.rank() > 1 || large[0].item<float>() == 0, "the message");
    }
    std::printf("rank %d of %d, local %d of %d: well\n", world.rank(), world.size(), world.local_rank(),
                world.local_size());
  } else if (mode == "launched") {
    return lockstep::launch(1, arguments, [](const World& world) {
      check_all(world);
      std::puts("launched: well");
    });
  } else if (mode == "serialized") {
    check(initialize(MPI_THREAD_SERIALIZED) == MPI_THREAD_SERIALIZED, "the thread level");
    check_all(lockstep::mpi_world());
    check(!lockstep::detail::MpiEngine::get().has_thread(), "no thread");
    MPI_Finalize();
    std::puts("serialized: well");
  } else if (mode == "of_program") {  // ranks in the reverse order
    initialize(MPI_THREAD_MULTIPLE);
    int rank = 0, size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm reversed = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
    const World world = lockstep::mpi_world(reversed);
    check(world.rank() == size - 1 - rank, "the rank");
    if (size > 1 && rank != world.rank()) try {
        const MpiComm other(world);
        check(false, "other ranks");
      } catch (const lockstep::UsageError& error) {
        std::printf("%s\n", error.what());
      }
    check_all(world, reversed);
    MPI_Comm_free(&reversed);
    MPI_Finalize();
    std::puts("of_program: well");
  } else if (mode == "funneled") {
    initialize(MPI_THREAD_FUNNELED);
    lockstep::mpi_world();
  } else if (mode == "finalized") {
    initialize(MPI_THREAD_MULTIPLE);
    MPI_Finalize();
    lockstep::mpi_world();
  } else if (mode == "other_library") {
    lockstep::detail::check_mpi_library(lockstep::detail::compiled_for_open_mpi
                                            ? "MPICH Version:\t4.0.2\nMPICH Release"
                                            : "Open MPI v4.1.4, package: Debian");
  } else if (mode == "finalized_later") {
    initialize(MPI_THREAD_MULTIPLE);
    const World world = lockstep::mpi_world();
    MpiComm comm(world);
    MPI_Finalize();
    comm.barrier();
  } else if (mode == "abort") {  // of an all_reduce that not every rank launches
    const World world = lockstep::mpi_world();
    MpiComm comm(world);
    at::Tensor tensor = at::ones({10});
    if (world.rank() > 0) {
      auto work = comm.all_reduce(tensor);
      try {
        work.wait();
      } catch (const lockstep::PeerError& error) {
        std::printf("%s\n", error.what());
      }
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      comm.abort("enough");
    }
    try {
      comm.barrier();
    } catch (const lockstep::Error& error) {
      std::printf("later: %s\n", error.what());
    }
  } else if (mode == "leaves" || mode == "leaves_serialized") {
    // Rank 0 does, before the others launch what it has in flight.
    initialize(mode == "leaves" ? MPI_THREAD_MULTIPLE : MPI_THREAD_SERIALIZED);
    const auto timeout = std::chrono::seconds(20);
    at::Tensor tensor, message = at::full({100'000}, 5.0);
    auto begin = std::chrono::steady_clock::now();
    int rank = 0, size = 0;
    {
      const World world = lockstep::mpi_world();
      rank = world.rank();
      size = world.size();
      tensor = at::full({100'000}, rank + 1.0);
      MpiComm comm(world, {.timeout = timeout});
      int goes = 1;
      if (rank > 0) MPI_Recv(&goes, 1, MPI_INT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      auto work = comm.all_reduce(tensor);
      if (rank == 0) static_cast<void>(comm.send(message, 1));
      if (rank == 1) {
        at::Tensor received = at::zeros_like(message);
        comm.recv(received, 0).wait();
        check_equal(received, message, "the message of a rank that has left");
      }
      if (rank > 0) work.wait();
      begin = std::chrono::steady_clock::now();
    }
    check(std::chrono::steady_clock::now() - begin < timeout, "a destructor waits for no other rank");
    for (int goes = 1, other = 1; rank == 0 && other < size; ++other)
      MPI_Send(&goes, 1, MPI_INT, other, 0, MPI_COMM_WORLD);
    MPI_Finalize();
    check_equal(tensor, at::full({100'000}, size * (size + 1) / 2.0), "the sum");
    std::puts((mode + ": well").c_str());
  } else if (mode == "mismatch") {
    const World world = lockstep::mpi_world();
    MpiComm comm(world, {.timeout = std::chrono::seconds(20)});
    at::Tensor tensor = at::ones({1000 * (world.rank() + 1)});
    comm.all_reduce(tensor).wait();
    comm.barrier();
    std::this_thread::sleep_for(std::chrono::seconds(3));
    comm.barrier();
  } else if (mode == "dies") {
    const World world = lockstep::mpi_world();
    MpiComm comm(world);
    if (world.rank() == 1) std::_Exit(9);
    comm.barrier();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "all", argv);
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    std::fflush(stdout);
    return 1;
  }
}
