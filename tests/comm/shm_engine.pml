/* A model of how ranks in shared memory launch, take and sleep (shm_engine.hpp), for Spin: each line that touches what
   the ranks share is one step, and every order of the steps of all ranks is looked at. A rank sleeps here without a
   timeout, so that a waking that is lost is a deadlock. Pieces use SLOTS slots in turn. */
#ifndef RANKS
#define RANKS 2
#endif
#define SLOTS 2
#ifndef PIECES
#define PIECES 5
#endif

byte open[SLOTS], arrived[SLOTS], taken[SLOTS];
byte input[6];  /* of SLOTS * RANKS: the piece whose input a rank has in a slot's block */
bool sleeps[RANKS], starved[RANKS];
byte bell[RANKS];

/* ShmEngine::wake_all: looks, takes the marks away, and rings for each rank that had one. */
#define WAKE_ALL(marks) \
  other = 0; \
  do \
  :: other < RANKS -> \
     atomic { had = marks[other]; marks[other] = false }; \
     if \
     :: had -> bell[other] = (bell[other] + 1) % 8 \
     :: else \
     fi; \
     other++ \
  :: else -> break \
  od

/* ShmEngine::step: `moved` tells whether there was something to do. */
inline step() {
  moved = false;
  if
  :: launched < PIECES ->
     if
     :: open[launched % SLOTS] == launched ->
        input[(launched % SLOTS) * RANKS + me] = launched + 1;
        atomic { arrived[launched % SLOTS]++; last = arrived[launched % SLOTS] == RANKS };
        launched++;
        moved = true;
        if
        :: last -> WAKE_ALL(sleeps)
        :: else
        fi
     :: else
     fi
  :: else
  fi;
  if
  :: done < launched ->
     if
     :: arrived[done % SLOTS] == RANKS ->
        other = 0;
        do
        :: other < RANKS -> assert(input[(done % SLOTS) * RANKS + other] == done + 1); other++
        :: else -> break
        od;
        atomic { taken[done % SLOTS]++; last = taken[done % SLOTS] == RANKS };
        if
        :: last ->
           arrived[done % SLOTS] = 0;
           taken[done % SLOTS] = 0;
           open[done % SLOTS] = done + SLOTS;
           done++;
           WAKE_ALL(starved)
        :: else -> done++
        fi;
        moved = true
     :: else
     fi
  :: else
  fi
}

proctype rank(byte me) {
  byte launched, done, rings, other;
  bool moved, last, had;
  do
  :: done == PIECES -> break
  :: else ->
     step();
     if
     :: moved
     :: else ->
        rings = bell[me];
        sleeps[me] = true;
        if
        :: launched < PIECES -> starved[me] = true
        :: else
        fi;
#ifdef NO_SECOND_LOOK  /* a mistake that the model must find */
        moved = false;
#else
        step();
#endif
        if
        :: moved
        :: else -> bell[me] != rings
        fi
     fi
  od
}

init {
  byte i;
  atomic {
    i = 0;
    do
    :: i < SLOTS -> open[i] = i; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < RANKS -> run rank(i); i++
    :: else -> break
    od
  }
}
