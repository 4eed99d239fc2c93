/* A model of how messages go from one rank to another, and of how ranks share the sum of one piece, in shared memory
   (shm_engine.hpp: step_send, step_receive, sum_together), for Spin: see shm_engine.pml. */
#define SLOTS 2
#define MESSAGES 3
#define PARTS 2 /* of a message */
#define RANKS 3 /* of the sum: the messages go from rank 0 to rank 1 */

mtype = {none, announced, wanted, filled};
mtype state[SLOTS] = none;
byte number[SLOTS], part[SLOTS]; /* the message in a slot, and its part in the block, from 1 */
byte claimed, reduced;
bool summed[RANKS]; /* by part */
bool sleeps[RANKS];
byte bell[RANKS];

inline wake(peer) {
  atomic { had = sleeps[peer]; sleeps[peer] = false };
  if
  :: had -> bell[peer] = (bell[peer] + 1) % 8
  :: else
  fi
}
/* Waits as ShmEngine::wait does: `step` sets `moved`, and `over` ends it. */
#define WAIT(over, step) \
  do \
  :: over -> break \
  :: else -> \
     step; \
     if \
     :: moved \
     :: else -> \
        rings = bell[me]; \
        sleeps[me] = true; \
        LOOK(step); \
        if \
        :: moved \
        :: else -> bell[me] != rings \
        fi \
     fi \
  od
#ifdef NO_SECOND_LOOK /* a mistake that the model must find */
#define LOOK(step) moved = false
#else
#define LOOK(step) step
#endif

/* Messages 1 and 3 have their first part with them, message 2 waits until it is asked for. */
inline step_send() {
  moved = false;
  m = 0;
  do
  :: m < MESSAGES ->
     if
     :: slot[m] == SLOTS ->
        i = 0;
        do
        :: i < SLOTS && busy[i] -> i++
        :: else -> break
        od;
        if
        :: i < SLOTS ->
           busy[i] = true;
           slot[m] = i;
           number[i] = m;
           sent[m] = 1 - m % 2;
           part[i] = sent[m];
           state[i] = announced;
           wake(1);
           moved = true
        :: else -> break /* the messages behind it wait, too */
        fi
     :: slot[m] < SLOTS ->
        if
        :: state[slot[m]] == none -> busy[slot[m]] = false; slot[m] = SLOTS + 1; ended++; moved = true
        :: state[slot[m]] == wanted ->
           sent[m]++;
#ifdef FILLED_TOO_EARLY /* another mistake */
           state[slot[m]] = filled;
           part[slot[m]] = sent[m];
#else
           part[slot[m]] = sent[m];
           state[slot[m]] = filled;
#endif
           wake(1);
           moved = true
        :: else
        fi
     :: else
     fi;
     m++
  :: else -> break
  od
}
proctype sender() {
  byte slot[MESSAGES], sent[MESSAGES], ended, i, m, rings;
  bool busy[SLOTS], moved, had;
  byte me = 0;
  slot[0] = SLOTS; slot[1] = SLOTS; slot[2] = SLOTS;
  WAIT(ended == MESSAGES, step_send())
}

inline take_part() {
  assert(number[at] == received && part[at] == got + 1);
  got++;
  if
  :: got == PARTS -> state[at] = none; at = SLOTS; got = 0; received++
  :: else -> state[at] = wanted
  fi;
  wake(0);
  moved = true
}
inline step_receive() {
  moved = false;
  if
  :: at == SLOTS ->
     i = 0;
     left = SLOTS;
     do /* a full circle after each one found */
     :: left > 0 ->
        if
        :: state[i] == announced && (at == SLOTS || number[i] < number[at]) -> at = i; left = SLOTS
        :: else -> left--
        fi;
        i = (i + 1) % SLOTS
     :: else -> break
     od;
     if
     :: at < SLOTS && part[at] == 0 -> state[at] = wanted; wake(0); moved = true
     :: at < SLOTS && part[at] > 0 -> take_part()
     :: else
     fi
  :: else ->
     if
     :: state[at] == filled -> take_part()
     :: else
     fi
  fi
}
proctype receiver() {
  byte received, got, i, left, rings;
  byte at = SLOTS;
  bool moved, had;
  byte me = 1;
  WAIT(received == MESSAGES, step_receive())
}

/* Each rank sums the parts that it finds free, and takes the result once all are summed. */
inline step_sum() {
  moved = false;
  do
  :: claimed < RANKS ->
     atomic { mine = claimed; claimed++ };
     if
     :: mine >= RANKS -> break
     :: else
     fi;
#ifdef COUNTED_TOO_EARLY /* another mistake */
     atomic { reduced++; last = reduced == RANKS };
     summed[mine] = true;
#else
     summed[mine] = true;
     atomic { reduced++; last = reduced == RANKS };
#endif
     moved = true;
     if
     :: last -> i = 0; do :: i < RANKS -> wake(i); i++ :: else -> break od
     :: else
     fi
  :: else -> break
  od;
  if
  :: reduced == RANKS -> assert(summed[0] && summed[1] && summed[2]); taken = true; moved = true
  :: else
  fi
}
proctype summing(byte me) {
  byte mine, i, rings;
  bool moved, had, last, taken;
  WAIT(taken, step_sum())
}

init {
#ifdef SUM
  atomic { run summing(0); run summing(1); run summing(2) }
#else
  atomic { run sender(); run receiver() }
#endif
}
