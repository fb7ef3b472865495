/* SPDX-License-Identifier: Apache-2.0 */
/* A process that is aborted, by gloo for instance, first lets a thread of Python's say why.
 *
 * The handler writes to one pipe, and waits a while for the answers on another: one when the thread
 * has begun, one when it has ended. Then the process is aborted as without it.
 */

#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

const uint32_t ttrace_source = TTRACE_SOURCE; /* the CRC-32 of this file */

static int asks, answers, patience;
static pid_t owner;
static atomic_flag asked = ATOMIC_FLAG_INIT;

static int answered(int milliseconds) {
  char byte;
  struct pollfd from = {.fd = answers, .events = POLLIN};
  return poll(&from, 1, milliseconds) == 1 && read(answers, &byte, 1) == 1;
}

static void on_abort(int number) {
  /* A thread that has Python's lock keeps the other one from beginning. */
  if (getpid() == owner && !atomic_flag_test_and_set(&asked) && write(asks, "?", 1) == 1 &&
      answered(1000))
    answered(patience);
  struct sigaction plain = {.sa_handler = SIG_DFL};
  sigaction(number, &plain, 0);
  raise(number);
}

/* Whether the handler is there: it never replaces another one. Milliseconds of patience. */
int ttrace_guard(int to, int from, int milliseconds) {
  struct sigaction before, ours = {.sa_handler = on_abort};
  if (sigaction(SIGABRT, 0, &before) || before.sa_flags & SA_SIGINFO) return 0;
  if (before.sa_handler != SIG_DFL && before.sa_handler != on_abort) return 0;
  asks = to, answers = from, patience = milliseconds, owner = getpid();
  atomic_flag_clear(&asked);
  return !sigaction(SIGABRT, &ours, 0);
}

/* Takes it away again, if it is still there. */
void ttrace_unguard(void) {
  struct sigaction now, plain = {.sa_handler = SIG_DFL};
  if (!sigaction(SIGABRT, 0, &now) && now.sa_handler == on_abort) sigaction(SIGABRT, &plain, 0);
}
