// ShmComm and its backend: the bits of Gloo, bounded memory, and no order in which ranks must wait.
#include "lockstep/comm/shm_comm.hpp"

#include <sys/resource.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/detail/shm_backend.hpp"
#include "lockstep/comm/detail/shm_exchange.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

namespace shm_ranks_test {

using Backend = c10::intrusive_ptr<c10d::Backend>;

c10::intrusive_ptr<c10d::Store> new_store() {
  static int made = 0;
  if (test_world().size() == 1) return c10::make_intrusive<c10d::HashStore>();
  return c10::make_intrusive<c10d::PrefixStore>("test/shm " + std::to_string(made++), test_world().store());
}
Backend shm_backend() {
  const auto store = new_store();
  auto shared = lockstep::detail::share_memory(
      {[&](const std::string& key, const std::string& value) { store->set(key, value); },
       [&](const std::string& key) { return store->get_to_str(key); }},
      test_world().rank(), test_world().size(), std::chrono::seconds(30));
  REQUIRE(shared.obstacle == "");
  return c10::make_intrusive<lockstep::detail::ShmBackend>(std::move(shared.memory), test_world().rank(),
                                                           shared.spins);
}
Backend gloo_backend() {
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
  options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  return c10::make_intrusive<c10d::ProcessGroupGloo>(new_store(), test_world().rank(), test_world().size(),
                                                     options);
}

// Numbers of this rank that round differently in another order of the ranks.
at::Tensor drawn(std::int64_t count, at::ScalarType type) {
  const at::Tensor numbers = torch::randn({count}, at::kFloat) * 100;
  if (type == at::kBool) return numbers > 0;
  return numbers.to(type);
}
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.clone(at::MemoryFormat::Contiguous).view({-1}).view(at::kByte);
  };
  return at::equal(bytes(a), bytes(b));
}

void check_bits(const std::vector<std::int64_t>& counts, const std::vector<at::ScalarType>& types,
                const std::vector<c10d::ReduceOp::RedOpType>& ops) {
  const auto shm = shm_backend(), gloo = gloo_backend();
  const int rank = test_world().rank(), ranks = test_world().size();
  torch::manual_seed(100 + rank);
  for (const auto type : types)
    for (const auto op : ops)
      for (const std::int64_t count : counts) {
        CAPTURE(c10::toString(type), static_cast<int>(op), count);
        const at::Tensor input = drawn(count, type);
        const auto both = [&](const auto& run) {
          std::vector<at::Tensor> one{input.clone()}, other{input.clone()};
          run(*gloo, one);
          run(*shm, other);
          return std::pair{one[0], other[0]};
        };
        const auto [sum, own_sum] = both([&](c10d::Backend& backend, std::vector<at::Tensor>& tensors) {
          backend.allreduce(tensors, {.reduceOp = op})->wait();
        });
        CHECK(same_bits(sum, own_sum));
        for (const int root : {0, ranks - 1}) {
          const auto [reduced, own_reduced] =
              both([&](c10d::Backend& backend, std::vector<at::Tensor>& tensors) {
                backend.reduce(tensors, {.reduceOp = op, .rootRank = root})->wait();
              });
          if (rank == root) CHECK(same_bits(reduced, own_reduced));
        }
      }
}

using Op = c10d::ReduceOp;

TEST_CASE("sums, products, least and greatest have the bits of Gloo") {
  check_bits({1, 7, 1000, 70001}, {at::kFloat, at::kHalf, at::kLong}, {Op::SUM, Op::MAX});
  check_bits({3000001}, {at::kFloat}, {Op::SUM});
}

TEST_CASE("every dtype and operation has the bits of Gloo", "[.release]") {
  check_bits({1, 2, 5, 64, 1021, 262145},
             {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kInt, at::kLong},
             {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX});
  check_bits({5000003}, {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}, {Op::SUM});
  check_bits({1, 5, 1021}, {at::kBool}, {Op::MIN, Op::MAX});
}

TEST_CASE("what Gloo cannot reduce is refused") {
  const auto shm = shm_backend();
  for (const auto type : {at::kShort, at::kComplexFloat}) {
    std::vector<at::Tensor> tensors{at::ones({4}, type)};
    CHECK_THROWS(shm->allreduce(tensors));
  }
}

TEST_CASE("of a NaN and a number the result is Gloo's") {
  const auto shm = shm_backend(), gloo = gloo_backend();
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    for (const auto op : {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX})
      for (int nan = 0; nan < test_world().size(); ++nan) {
        CAPTURE(c10::toString(type), static_cast<int>(op), nan);
        at::Tensor input = at::arange(0, 60, at::kFloat).to(type) * (test_world().rank() + 1);
        if (test_world().rank() == nan) input.fill_(std::numeric_limits<float>::quiet_NaN());
        std::vector<at::Tensor> one{input.clone()}, other{input.clone()};
        gloo->allreduce(one, {.reduceOp = op})->wait();
        shm->allreduce(other, {.reduceOp = op})->wait();
        CHECK(at::equal(one[0].isnan(), other[0].isnan()));
        gloo->reduce(one, {.reduceOp = op, .rootRank = 0})->wait();
        shm->reduce(other, {.reduceOp = op, .rootRank = 0})->wait();
        if (test_world().rank() == 0) CHECK(at::equal(one[0].isnan(), other[0].isnan()));
      }
}

TEST_CASE("a sum of bool is a logical or, and a product a logical and") {
  const auto shm = shm_backend();
  const int rank = test_world().rank(), ranks = test_world().size();
  std::vector<at::Tensor> any{at::zeros({ranks + 1}, at::kBool)}, all{at::ones({ranks + 1}, at::kBool)};
  any[0][rank] = true;
  all[0][rank] = false;
  shm->allreduce(any)->wait();
  shm->allreduce(all, {.reduceOp = Op::PRODUCT})->wait();
  for (int i = 0; i <= ranks; ++i) {
    CHECK(any[0].data_ptr<bool>()[i] == (i < ranks));
    CHECK(all[0].data_ptr<bool>()[i] == (i == ranks));
  }
}

TEST_CASE("collectives that move bytes") {
  const auto shm = shm_backend();
  const int rank = test_world().rank(), ranks = test_world().size();
  for (const std::int64_t count : {1, 1000, 300000}) {
    const at::Tensor own = at::arange(count, at::kInt) + rank * 1000;
    const auto of = [&](int other) { return at::arange(count, at::kInt) + other * 1000; };
    std::vector<at::Tensor> tensors{own.clone()};
    shm->broadcast(tensors, {.rootRank = ranks - 1})->wait();
    CHECK(at::equal(tensors[0], of(ranks - 1)));
    std::vector<std::vector<at::Tensor>> lists(1);
    for (int i = 0; i < ranks; ++i) lists[0].push_back(at::empty({count}, at::kInt));
    std::vector<at::Tensor> input{own};
    shm->allgather(lists, input)->wait();
    for (int i = 0; i < ranks; ++i) CHECK(at::equal(lists[0][static_cast<std::size_t>(i)], of(i)));
    at::Tensor rows = own.repeat({ranks}), received = at::empty_like(rows);
    lockstep::detail::all_to_all_single(*shm, received, rows)->wait();
    for (int i = 0; i < ranks; ++i) CHECK(at::equal(received.view({ranks, -1})[i], of(i)));
  }
  shm->barrier()->wait();
}

TEST_CASE("more than the memory holds is in flight, and a large message, in any order") {
  lockstep::ShmComm comm{test_world()};
  const int rank = comm.rank(), ranks = comm.size();
  const std::int64_t count = 10 << 20;  // 40 MiB
  std::vector<at::Tensor> tensors;
  std::vector<lockstep::ShmComm::Work> works;
  for (int i = 0; i < 6; ++i) {
    tensors.push_back(at::full({count}, rank + i, at::kFloat));
    works.push_back(comm.all_reduce(tensors.back()));
  }
  for (std::size_t i = works.size(); i-- > 0;) {  // the last first
    works[i].wait();
    CHECK(tensors[i][count - 1].item<float>() ==
          static_cast<float>(ranks * (ranks - 1) / 2 + static_cast<int>(i) * ranks));
  }
  if (ranks == 1) return;
  const int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
  const at::Tensor large = at::full({count}, rank, at::kFloat), small = at::full({3}, rank, at::kFloat);
  at::Tensor large_in = at::empty({count}, at::kFloat), small_in = at::empty({3}, at::kFloat);
  auto first = comm.send(large, next, 7), second = comm.send(small, next, 8);
  comm.recv(small_in, before, 8).wait();
  comm.recv(large_in, before, 7).wait();
  first.wait();
  second.wait();
  CHECK(small_in[2].item<float>() == static_cast<float>(before));
  CHECK(large_in[count - 1].item<float>() == static_cast<float>(before));
}

TEST_CASE("a communicator that is shut down has sent what was to be sent, whoever holds its Work", "[2+]") {
  lockstep::ShmComm comm{test_world()};
  at::Tensor large = at::full({4 << 20}, comm.rank(), at::kFloat);
  if (comm.rank() == 0) {
    const auto sent = comm.send(large, 1);
    comm.shutdown();
  } else {
    if (comm.rank() == 1) comm.recv(large, 0).wait();
    comm.shutdown();
  }
  CHECK(large[large.numel() - 1].item<float>() == (comm.rank() == 1 ? 0 : static_cast<float>(comm.rank())));
}

TEST_CASE("a wait on one communicator moves the others on, whichever a rank waits for") {
  lockstep::ShmComm one{test_world()}, other{test_world()};
  const std::int64_t count = 50 << 20;  // 200 MiB, more than a rank may have in flight
  at::Tensor a = at::ones({count}), b = at::ones({count});
  auto first = one.all_reduce(a), second = other.all_reduce(b);
  (one.rank() % 2 == 0 ? first : second).wait();
  (one.rank() % 2 == 0 ? second : first).wait();
  CHECK(a[count - 1].item<float>() == static_cast<float>(one.size()));
  CHECK(b[0].item<float>() == static_cast<float>(one.size()));
}

TEST_CASE("a rank that has launched its part gives the others room while it waits for something else",
          "[2+]") {
  lockstep::ShmComm one{test_world()}, other{test_world()};
  at::Tensor large =
      at::full({40 << 20}, one.rank(), at::kFloat);  // 160 MiB, more than the root may have in flight
  at::Tensor small = at::ones({3});
  if (one.rank() == 0) {
    for (int rank = 1; rank < one.size(); ++rank) other.recv(small, rank).wait();  // it has launched its part
    one.broadcast(large, 0).wait();
    other.all_reduce(small).wait();
  } else {
    auto broadcast = one.broadcast(large, 0);
    other.send(small, 0).wait();
    other.all_reduce(small).wait();
    broadcast.wait();
  }
  CHECK(small[2].item<float>() == static_cast<float>(one.size()));
  CHECK(large[large.numel() - 1].item<float>() == 0);
}

// How many memories this process shares with other ranks.
int shared_memories() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("/memfd:lockstep") != std::string::npos;
  return count;
}

TEST_CASE("where one rank cannot share memory ShmComm throws on all of them, and CpuComm uses Gloo", "[2+]") {
  const int before = shared_memories();
  CHECK((lockstep::CpuComm{test_world()}, shared_memories() > before));
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const rlimit small{1 << 20, limit.rlim_max};
  if (test_world().rank() == 0) REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  CHECK_THROWS_WITH(lockstep::ShmComm{test_world()}, ContainsSubstring("rank 0: the limit of a file's size"));
  const int shared = shared_memories();  // groups that have ended may still release theirs
  lockstep::CpuComm comm{test_world()};
  CHECK(shared_memories() <= shared);
  at::Tensor ones = at::ones({5});
  comm.all_reduce(ones).wait();
  CHECK(ones[4].item<float>() == static_cast<float>(comm.size()));
  setrlimit(RLIMIT_FSIZE, &limit);
}

TEST_CASE("reduce_scatter has the bits of Gloo's") {
  lockstep::ShmComm shm{test_world()};
  lockstep::GlooComm gloo{test_world()};
  const auto backend = gloo_backend();
  for (const std::int64_t count : {1, 1000, 300'001})
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf}) {
      const at::Tensor rows = drawn(shm.size() * count, type).view({shm.size(), count});
      at::Tensor expected = at::empty({count}, type), input = rows.view({-1});
      lockstep::detail::reduce_scatter_single(*backend, expected, input, c10d::ReduceScatterOptions{})
          ->wait();
      const auto check = [&](auto& comm) {
        at::Tensor row = at::empty({count}, type), apart = at::empty({count, 2}, type).select(1, 0);
        comm.reduce_scatter(row, rows).wait();
        CHECK(same_bits(row, expected));
        comm.reduce_scatter(apart, rows).wait();
        CHECK(same_bits(apart, expected));
      };
      check(shm);
      check(gloo);
    }
}

using Tensors = std::vector<at::Tensor>;

Tensors list_of(std::int64_t count, at::ScalarType type) {
  Tensors list;
  for (int i = 0; i < test_world().size(); ++i) list.push_back(drawn(count, type));
  return list;
}
// Tensors of the shape of `like` that are zero, and not contiguous where `apart`.
Tensors zeros_like(const Tensors& like, bool apart) {
  Tensors list;
  for (const at::Tensor& tensor : like) {
    at::Tensor zeros = at::zeros({tensor.numel(), apart ? 2 : 1}, tensor.options());
    list.push_back(zeros.select(1, 0).view(tensor.sizes()));
  }
  return list;
}

TEST_CASE("gather, scatter and reduce_scatter have the bits of Gloo's") {
  const auto shm = shm_backend(), gloo = gloo_backend();
  const int rank = test_world().rank(), ranks = test_world().size();
  torch::manual_seed(200 + rank);
  for (const std::int64_t count : {0, 1, 7, 1000, 70001})
    for (const auto type : {at::kFloat, at::kBFloat16, at::kLong})
      for (const bool apart : {false, true}) {
        const int root = apart ? 0 : ranks - 1;
        CAPTURE(count, c10::toString(type), root, apart);
        const Tensors inputs = list_of(count, type);
        // `run(backend, outputs, inputs)` starts an operation.
        const auto compare = [&](const char* name, const auto& run) {
          CAPTURE(name);
          Tensors expected = zeros_like(inputs, false), outputs = zeros_like(inputs, apart), own = inputs;
          run(*gloo, expected, own)->wait();
          run(*shm, outputs, own)->wait();
          for (std::size_t i = 0; i < outputs.size(); ++i) CHECK(same_bits(outputs[i], expected[i]));
          for (std::size_t i = 0; i < inputs.size(); ++i) CHECK(at::equal(own[i], inputs[i]));
        };
        compare("gather", [&](c10d::Backend& backend, const Tensors& to, const Tensors& from) {
          std::vector<Tensors> lists(rank == root ? 1 : 0, to);
          Tensors input{from[0]};
          return backend.gather(lists, input, {.rootRank = root});
        });
        compare("scatter", [&](c10d::Backend& backend, const Tensors& to, const Tensors& from) {
          std::vector<Tensors> lists(rank == root ? 1 : 0, from);
          Tensors output{to[0]};
          return backend.scatter(output, lists, {.rootRank = root});
        });
        if (count == 0) continue;  // Gloo's reduce_scatter refuses it
        for (const auto op : {Op::SUM, Op::MAX}) {
          compare("reduce_scatter", [&](c10d::Backend& backend, const Tensors& to, const Tensors& from) {
            std::vector<Tensors> lists{from};
            Tensors output{to[0]};
            return backend.reduce_scatter(output, lists, {.reduceOp = op});
          });
          compare("reduce_scatter_single", [&](c10d::Backend& backend, Tensors& to, const Tensors& from) {
            at::Tensor rows = at::cat(from);
            return lockstep::detail::reduce_scatter_single(backend, to[0], rows,
                                                           c10d::ReduceScatterOptions{.reduceOp = op});
          });
        }
      }
}

// How many rows rank `from` sends to rank `to`: none to some.
std::int64_t split_size(int from, int to, std::int64_t scale) {
  return (from + 2 * to + 1) % 3 * scale;
}

TEST_CASE("all-to-alls in uneven parts have the bits of Gloo's") {
  const auto shm = shm_backend(), gloo = gloo_backend();
  const int rank = test_world().rank(), ranks = test_world().size();
  using Sizes = std::vector<std::int64_t>;
  const auto run = [](c10d::Backend& backend, at::Tensor& to, at::Tensor& from, Sizes out, Sizes in) {
    backend.alltoall_base(to, from, out, in)->wait();  // Gloo's takes the sizes away
  };
  for (const std::int64_t scale : {0, 1, 5, 100003})
    for (const auto type : {at::kFloat, at::kBFloat16, at::kLong}) {
      CAPTURE(scale, c10::toString(type));
      Sizes out, in, even, none;
      Tensors outputs, inputs;
      for (int other = 0; other < ranks; ++other) {
        out.push_back(split_size(other, rank, scale));
        in.push_back(split_size(rank, other, scale));
        even.push_back(2);
      }
      at::Tensor input = drawn(3 * c10::sum_integers(in), type).view({-1, 3});
      at::Tensor expected = at::zeros({c10::sum_integers(out), 3}, type), output = at::zeros_like(expected);
      run(*gloo, expected, input, out, in);
      run(*shm, output, input, out, in);
      CHECK(same_bits(output, expected));

      for (const std::int64_t rows : in) inputs.push_back(drawn(3 * rows, type).view({3, rows}).t());
      for (const std::int64_t rows : out) outputs.push_back(at::zeros({3, rows}, type).t());
      input = at::cat(inputs).contiguous();
      run(*gloo, expected, input, out, in);
      shm->alltoall(outputs, inputs)->wait();
      CHECK(same_bits(at::cat(outputs), expected));

      at::Tensor rows = drawn(2 * ranks * 4, type).view({2 * ranks, 4}), to = at::zeros_like(rows),
                 by_gloo = at::zeros_like(rows);
      run(*gloo, by_gloo, rows, even, even);
      run(*shm, to, rows, even, none);
      CHECK(same_bits(to, by_gloo));
    }
}

TEST_CASE("uneven all-to-alls and messages are in flight together, and nobody holds their tensors or Works") {
  const auto shm = shm_backend();
  const int rank = test_world().rank(), ranks = test_world().size();
  const auto launch = [&](int number, at::Tensor& output) {
    std::vector<std::int64_t> out, in;
    for (int other = 0; other < ranks; ++other) {
      out.push_back(split_size(other, rank, 200000));
      in.push_back(split_size(rank, other, 200000));
    }
    output = at::zeros({c10::sum_integers(out)}, at::kInt);
    at::Tensor input = at::full({c10::sum_integers(in)}, 10 * rank + number, at::kInt);
    return shm->alltoall_base(output, input, out, in);
  };
  const auto check = [&](int number, const at::Tensor& output) {
    std::int64_t begin = 0;
    for (int other = 0; other < ranks; ++other) {
      const std::int64_t rows = split_size(other, rank, 200000);
      CHECK((output.narrow(0, begin, rows) == 10 * other + number).all().item<bool>());
      begin += rows;
    }
  };
  Tensors sent{at::full({300000}, rank, at::kInt)}, received{at::zeros({300000}, at::kInt)};
  at::Tensor first, second, third;
  const auto one = launch(1, first);
  const auto message = shm->send(sent, (rank + 1) % ranks, 0);
  const auto two = launch(2, second);
  int ends = 0;
  static_cast<lockstep::detail::HostWork&>(*two).at_end([&](bool failed) { ends += failed ? 100 : 1; });
  two->wait();
  CHECK(ends == 1);
  CHECK(two->isCompleted());
  CHECK(two->isSuccess());
  check(2, second);
  shm->recv(received, (rank + ranks - 1) % ranks, 0)->wait();
  CHECK(received[0][299999].item<int>() == (rank + ranks - 1) % ranks);
  one->wait();
  check(1, first);
  message->wait();
  launch(3, third).reset();
  auto& own = dynamic_cast<lockstep::detail::HostBackend&>(*shm);
  CHECK(own.drain(std::chrono::steady_clock::now() + std::chrono::seconds(60)));  // sent
  shm->barrier()->wait();
  check(3, third);
}

TEST_CASE("lists and sizes that do not fit are refused") {
  const auto shm = shm_backend();
  const int rank = test_world().rank(), ranks = test_world().size();
  Tensors row{at::ones({4})}, list = list_of(4, at::kFloat), longer = list_of(4, at::kFloat);
  longer.push_back(row[0]);
  std::vector<Tensors> none, lists{list}, long_lists{longer};
  CHECK_THROWS_WITH(shm->gather(rank == 0 ? none : lists, row, {.rootRank = 0}),
                    ContainsSubstring("must have one list"));
  CHECK_THROWS_WITH(shm->scatter(row, rank == 0 ? none : lists, {.rootRank = 0}),
                    ContainsSubstring("must have one list"));
  CHECK_THROWS_WITH(shm->gather(none, row, {.rootRank = ranks}), ContainsSubstring("a rank of the group"));
  CHECK_THROWS_WITH(shm->reduce_scatter(row, long_lists), ContainsSubstring("one tensor for each rank"));
  if (rank == 0) {
    CHECK_THROWS_WITH(shm->gather(long_lists, row), ContainsSubstring("one tensor for each rank"));
    CHECK_THROWS_WITH(shm->scatter(row, long_lists), ContainsSubstring("one tensor for each rank"));
  }
  at::Tensor rows = at::ones({2 * ranks}), other = at::ones({2 * ranks}, at::kLong), one = at::ones({2});
  CHECK_THROWS_WITH(shm->_reduce_scatter_base(one, other), ContainsSubstring("must have one row"));
  CHECK_THROWS_WITH(shm->alltoall(list, longer), ContainsSubstring("one tensor for each rank"));
  CHECK_THROWS_WITH(shm->alltoall(longer, longer), ContainsSubstring("one tensor for each rank"));
  std::vector<std::int64_t> even(static_cast<std::size_t>(ranks), 2), uneven = even, more = even;
  ++uneven[0];
  more.push_back(0);
  CHECK_THROWS_WITH(shm->alltoall_base(rows, rows, uneven, even), ContainsSubstring("Split sizes"));
  CHECK_THROWS_WITH(shm->alltoall_base(rows, rows, even, uneven), ContainsSubstring("Split sizes"));
  CHECK_THROWS_WITH(shm->alltoall_base(rows, rows, more, even), ContainsSubstring("Number of tensor splits"));
  CHECK_THROWS_WITH(shm->send(row, 0, -1), ContainsSubstring("there is no tag -1"));
  shm->barrier()->wait();
}

TEST_CASE("ranks whose split sizes differ fail, and those that launch another collective", "[2+]") {
  using lockstep::detail::OtherOperation;
  const auto shm = shm_backend();
  const int rank = test_world().rank(), ranks = test_world().size();
  const bool last = rank == ranks - 1;
  Tensors outputs = list_of(3, at::kFloat), inputs = list_of(3, at::kFloat);
  if (rank == 0) inputs.back() = at::ones({5});
  const auto work = shm->alltoall(outputs, inputs);
  if (last) {
    CHECK_THROWS_AS(work->wait(), OtherOperation);
    CHECK(work->isCompleted());
    CHECK_FALSE(work->isSuccess());
  } else {
    CHECK_NOTHROW(work->wait());
  }
  shm->barrier()->wait();
  const auto other = last ? shm->allreduce(inputs = {at::ones({3})}) : shm->alltoall(outputs, inputs);
  CHECK_THROWS_AS(other->wait(), OtherOperation);
  const auto next = shm_backend();
  const auto barrier = last ? next->barrier() : next->alltoall(outputs, inputs);
  CHECK_THROWS_AS(barrier->wait(), OtherOperation);
}

}  // namespace shm_ranks_test
