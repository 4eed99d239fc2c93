#include "support/catch.hpp"
#include "thread_ranks.hpp"

namespace collectives_test {

using namespace lockstep_test;
using lockstep::World;
using std::vector;

static_assert(lockstep::Reducing<FakeComm> && lockstep::Gathering<FakeComm> &&
              lockstep::PointToPoint<FakeComm> && lockstep::Splittable<FakeComm> &&
              lockstep::AsyncWork<FakeComm::Work>);

TEST_CASE("reductions come after the operators before them and before those behind") {
  for (int size : {1, 2, 3}) {
    FakeMachine machine;
    run_clean_ranks(machine, size, [&](const World& world) {
      FakeComm comm(world, quick());
      const double own = comm.rank() + 1, sum = size * (size + 1) / 2.0;
      using lockstep::ReduceOp;
      const vector<std::pair<ReduceOp, double>> wanted{{ReduceOp::sum, sum},
                                                       {ReduceOp::min, 1.0},
                                                       {ReduceOp::max, size},
                                                       {ReduceOp::product, std::tgamma(size + 1)}};
      for (const auto& [op, value] : wanted)
        for (auto type : {at::kFloat, at::kDouble, at::kLong, at::kHalf, at::kByte}) {
          auto tensor = later({5}, own, type);
          comm.all_reduce(tensor, op).wait();
          expect_equal(read(tensor), at::full({5}, value), "an all_reduce");
        }
      auto average = later({4}, 2 * own);
      comm.all_reduce(average, ReduceOp::avg).wait();
      expect(at::allclose(read(average), at::full({4}, 2 * sum / size)), "an average");
      auto any = later({2}, world.rank() == 0, at::kBool);
      comm.all_reduce(any, ReduceOp::sum).wait();
      expect(read(any).all().item<bool>(), "any of truth values");

      auto there = later({3}, own);
      comm.reduce(there, size - 1, ReduceOp::sum).wait();
      expect_equal(read(there), at::full({3}, comm.rank() == size - 1 ? sum : 7), "a reduce");

      auto row = at::empty({2});
      comm.reduce_scatter(row, later({size, 2}, own), ReduceOp::sum).wait();
      expect_equal(read(row), at::full({2}, sum), "a reduce_scatter");
    });
  }
}

TEST_CASE("movements deliver what was there when they were called") {
  for (int size : {1, 2, 3}) {
    FakeMachine machine;
    run_clean_ranks(machine, size, [&](const World& world) {
      FakeComm comm(world, quick());
      const double own = comm.rank() + 1;
      // int16 is a type that NCCL does not know.
      for (auto type : {at::kFloat, at::kShort, at::kBool, at::kComplexFloat}) {
        auto tensor = later({3}, own, type);
        comm.broadcast(tensor, size - 1).wait();
        fill_later(later({3}, 0, type), 1);
        expect_equal(read(tensor), at::full({3}, size), "a broadcast");
        auto all = at::empty({size, 2}, at::TensorOptions(type));
        comm.all_gather(all, later({2}, own, type)).wait();
        expect_equal(read(all), at::arange(1, size + 1).view({size, 1}).expand({size, 2}).to(type),
                     "an all_gather");
      }
      auto out = at::empty({size, 2}), in = at::empty({size, 2});
      for (int r = 0; r < size; ++r) fill_later(in[r], 10 * own + r);
      comm.all_to_all(out, in).wait();
      expect_equal(read(out), (10 * at::arange(1, size + 1) + comm.rank()).view({size, 1}).expand({size, 2}),
                   "an all_to_all");
      if (size == 1) return;
      if (comm.rank() == 0) {
        static_cast<void>(comm.send(vector{later({2}, 5), later({1}, 6, at::kInt)}, 1));
        static_cast<void>(comm.send(later({2}, 7), 1));
      } else if (comm.rank() == 1) {
        auto a = at::empty({2}), c = at::empty({2});
        auto b = at::empty({1}, at::kInt);
        comm.recv(vector{a, b}, 0).wait();
        comm.recv(c, 0).synchronize();
        expect_equal(read(a), at::full({2}, 5), "a message");
        expect_equal(read(b), at::full({1}, 6), "its second tensor");
        expect_equal(read(c), at::full({2}, 7), "a second message");
      }
    });
  }
}

TEST_CASE("lists are one group, of any dtypes, strides and sizes") {
  FakeMachine machine;
  run_clean_ranks(machine, 3, [&](const World& world) {
    FakeComm comm(world, quick());
    const double own = comm.rank() + 1;
    auto wide = later({4, 6}, own), integers = later({3}, own, at::kLong);
    auto column = wide.t(), part = wide.narrow(1, 1, 2);
    comm.all_reduce(vector{integers, part, at::empty({0}), column.narrow(0, 4, 2)}).wait();
    auto wanted = at::full({4, 6}, own);
    wanted.narrow(1, 1, 2).fill_(6);
    wanted.narrow(1, 4, 2).fill_(6);
    expect_equal(read(wide), wanted, "parts of a tensor");
    expect_equal(read(integers), at::full({3}, 6), "integers");
    comm.all_reduce(vector<at::Tensor>{}).synchronize();
    auto other = at::empty({3, 2}).t();
    comm.all_gather(vector<at::Tensor>{other}, vector<at::Tensor>{later({2}, own)}).wait();
    expect_equal(read(other).contiguous().view({-1}), at::tensor({1., 1., 2., 2., 3., 3.}),
                 "rows with strides");
  });
}

TEST_CASE("bytes of any length reach every rank, with and without waiting") {
  for (int size : {1, 3}) {
    FakeMachine machine;
    run_clean_ranks(machine, size, [&](const World& world) {
      FakeComm comm(world, quick());
      const auto text = [](int rank) { return std::string(static_cast<std::size_t>(rank) * 3, 'a'); };
      const auto long_text = [](int rank) { return std::string(rank == 0 ? 200000 : 1, 'b'); };
      const auto check = [&](const vector<std::string>& all, const auto& wanted) {
        expect(static_cast<int>(all.size()) == size, "as many texts as ranks");
        for (int r = 0; r < size; ++r) expect(all[static_cast<std::size_t>(r)] == wanted(r), "a rank's text");
      };
      check(comm.all_gather_bytes(text(comm.rank())), text);
      check(comm.all_gather_bytes(long_text(comm.rank())), long_text);
      expect(comm.broadcast_bytes(text(comm.rank()), size - 1) == text(size - 1), "a root's text");
      vector<std::string> all, again;
      auto first = comm.all_gather_bytes_async(all, text(comm.rank()));
      auto second = comm.all_gather_bytes_async(again, long_text(comm.rank()));
      std::string root = text(comm.rank());
      auto third = comm.broadcast_bytes_async(root, size - 1);
      third.synchronize();
      second.wait();
      first.synchronize();
      check(all, text);
      check(again, long_text);
      expect(root == text(size - 1), "a root's text");
      comm.barrier();
    });
  }
}

TEST_CASE("groups within a group have their own order") {
  FakeMachine machine;
  run_clean_ranks(machine, 3, [&](const World& world) {
    FakeComm comm(world, quick());
    auto outer = comm.new_group({0, 2});
    expect(outer.has_value() == (comm.rank() != 1), "a group for its members");
    auto whole = comm.new_group({0, 1, 2});
    auto tensor = later({2}, comm.rank() + 1);
    auto work = whole->all_reduce(tensor);
    if (outer) {
      auto own = later({2}, comm.rank() + 1);
      outer->all_reduce(own).wait();
      expect(outer->size() == 2 && outer->rank() == (comm.rank() == 0 ? 0 : 1), "ranks of its own");
      expect_equal(read(own), at::full({2}, 4), "a sum of two");
    }
    work.wait();
    expect_equal(read(tensor), at::full({2}, 6), "a sum of three");
    if (outer) outer->shutdown();
    whole->shutdown();
    comm.shutdown();
  });
}

TEST_CASE("a tensor that its caller lets go of at once lives until it has been reduced") {
  FakeMachine machine;
  run_clean_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick());
    for (int i = 0; i < 20; ++i) {
      auto tensor = later({1000}, comm.rank());
      auto work = comm.all_reduce(tensor);
      tensor.reset();
      if (i % 3 == 0) work.synchronize();
      if (i % 3 == 1) work.wait();
    }
    comm.barrier();
  });
}

TEST_CASE("a Work may be joined to another stream than the one it came from") {
  FakeMachine machine;
  run_clean_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick());
    auto& seat = FakeMachine::seat();
    auto* own = seat.current;
    auto* side = machine.make_stream(world.rank(), "a side stream");
    for (int i = 0; i < 5; ++i) {
      auto tensor = later({100}, 1);
      auto work = comm.all_reduce(tensor);
      seat.current = side;
      work.wait();
      machine.synchronize(side);
      seat.current = own;
      work.wait();
      expect_equal(read(tensor), at::full({100}, 2), "a sum");
    }
  });
}

TEST_CASE("joining blocks no host") {
  FakeMachine machine;
  run_clean_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick());
    comm.barrier();
    machine.freeze(world.rank());
    auto tensor = later({3}, 1);
    for (int i = 0; i < 10; ++i) {
      auto work = comm.all_reduce(tensor);
      work.wait();
      fill_later(tensor, i);
      expect(work.error() == nullptr, "no error while it runs");
    }
    machine.thaw(world.rank());
    comm.barrier();
  });
}

TEST_CASE("a communicator may be split while its collectives are under way") {
  FakeMachine machine;
  run_clean_ranks(machine, 3, [&](const World& world) {
    FakeComm comm(world, quick());
    auto tensor = later({2}, 1);
    machine.freeze(world.rank());
    auto work = comm.all_reduce(tensor);
    std::thread later_on([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      machine.thaw(world.rank());
    });
    auto inner = comm.new_group({0, 2});
    later_on.join();
    work.wait();
    expect_equal(read(tensor), at::full({2}, 3), "a sum of three");
    if (!inner) return;
    inner->all_reduce(tensor).wait();
    expect_equal(read(tensor), at::full({2}, 6), "a sum of two");
  });
}

TEST_CASE("a Work that is kept keeps no other from being used again") {
  FakeMachine machine;
  run_clean_ranks(machine, 1, [&](const World& world) {
    FakeComm comm(world, quick());
    auto tensor = later({2}, 1);
    auto kept = comm.all_reduce(tensor);
    kept.synchronize();
    for (int i = 0; i < 50; ++i) comm.all_reduce(tensor).synchronize();
    kept.wait();
  });
  CHECK(machine.events_made <= 8);
}

}  // namespace collectives_test
