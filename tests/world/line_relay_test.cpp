#include "lockstep/world/detail/line_relay.hpp"

#include <string>

#include "support/catch.hpp"

namespace line_relay_test {

using lockstep::Prefix;
using lockstep::detail::LineRelay;
using namespace std::chrono_literals;

namespace {

// A relay of ranks 0 to 2 and what comes out of it.
struct Fixture {
  explicit Fixture(Prefix prefix = Prefix::automatic, bool terminal = false)
      : relay(0, 3, prefix, terminal, terminal, [this](int sink, std::string_view bytes) {
          (sink == 1 ? out : error) += bytes;
          all += bytes;
        }) {}
  std::string out, error, all;
  LineRelay relay;
  LineRelay::Clock::time_point now = LineRelay::Clock::now();
};

}  // namespace

TEST_CASE("lines come out whole, the others' with their rank") {
  Fixture f;
  f.relay.feed(0, "be");
  f.relay.feed(2, "hel");
  f.relay.feed(0, "gin\n");
  f.relay.feed(2, "lo\nwor");
  f.relay.feed(2, "ld\n");
  CHECK(f.out == "begin\n[rank 1] hello\n[rank 1] world\n");
}

TEST_CASE("stdout and stderr are kept apart") {
  Fixture f;
  f.relay.feed(4, "to stdout\n");
  f.relay.feed(5, "to stderr\n");
  CHECK(f.out == "[rank 2] to stdout\n");
  CHECK(f.error == "[rank 2] to stderr\n");
}

TEST_CASE("the prefix is always, never, or there already") {
  Fixture always(Prefix::always), never(Prefix::never), automatic;
  for (auto* f : {&always, &never, &automatic}) {
    f->relay.feed(0, "a\n");
    f->relay.feed(2, "b\n");
    f->relay.feed(2, "[rank 1] c\n");
  }
  CHECK(always.out == "[rank 0] a\n[rank 1] b\n[rank 1] c\n");
  CHECK(never.out == "a\nb\n[rank 1] c\n");
  CHECK(automatic.out == "a\n[rank 1] b\n[rank 1] c\n");
}

TEST_CASE("bytes pass as they are") {
  Fixture f;
  std::string bytes;
  for (int i = 0; i < 100000; ++i) bytes += static_cast<char>(i * 7 % 256);
  for (std::size_t i = 0; i < bytes.size(); i += 999) f.relay.feed(0, std::string_view(bytes).substr(i, 999));
  f.relay.close(0);
  CHECK(f.out == bytes);
}

TEST_CASE("a long line is passed on while it lasts, and nobody else gets into it") {
  Fixture f;
  const std::string piece(100000, 'x');
  f.relay.feed(0, piece);
  CHECK(f.out == piece);
  f.relay.feed(2, "wait\n");
  CHECK(f.out == piece);
  f.relay.feed(0, "end\n");
  CHECK(f.out == piece + "end\n[rank 1] wait\n");
}

TEST_CASE("a line that does not go on is ended for those who wait") {
  Fixture f;
  const std::string piece(100000, 'x');
  f.relay.feed(0, piece, f.now);
  f.relay.feed(2, "wait\n", f.now);
  f.relay.tick(f.now + 50ms);
  CHECK(f.out == piece);
  f.relay.tick(f.now + 1s);
  CHECK(f.out == piece + "\n[rank 1] wait\n");
}

TEST_CASE("a long line waits for a long line, and is not forgotten") {
  Fixture f;
  const std::string piece(2u << 20, 'x');
  f.relay.feed(0, piece, f.now);
  f.relay.feed(2, piece, f.now);
  CHECK(f.relay.full(2));
  f.relay.tick(f.now + 1s);
  CHECK_FALSE(f.relay.full(2));
  CHECK(f.out == piece + "\n[rank 1] " + piece);
}

TEST_CASE("a last line without an end is kept as it is, or ended when others go on") {
  Fixture f;
  f.relay.feed(0, "no end");
  CHECK(f.out.empty());
  f.relay.close(0);
  CHECK(f.out == "no end");
  f.relay.feed(2, "more\n");
  CHECK(f.out == "no end\n[rank 1] more\n");
}

TEST_CASE("on a terminal a question shows before its line ends") {
  Fixture f(Prefix::automatic, true);
  f.relay.feed(0, "name? ", f.now);
  f.relay.tick(f.now + 10ms);
  CHECK(f.all.empty());
  f.relay.tick(f.now + 1s);
  CHECK(f.all == "name? ");
}

TEST_CASE("on a terminal a line takes the place of a bar") {
  Fixture f(Prefix::automatic, true);
  f.relay.feed(0, "[##..]\r");
  f.relay.feed(0, "[###.]\r");
  CHECK(f.all == "[##..]\r[###.]\r");
  f.relay.feed(3, "careful\n");
  CHECK(f.all == "[##..]\r[###.]\r\r\x1b[K[rank 1] careful\n");
  f.all.clear();
  f.relay.feed(0, "[####]\r");
  f.relay.feed(0, "\n");
  CHECK(f.all == "[####]\r\n");
}

}  // namespace line_relay_test
