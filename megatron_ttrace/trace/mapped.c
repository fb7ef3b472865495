/* SPDX-License-Identifier: Apache-2.0 */
/* What a process reads of a mapped file that another one truncates: zeros, instead of its end.
 *
 * The kernel answers an access behind a file's end with SIGBUS. The handler maps zeros over the rest
 * of the file, and remembers that; whoever has read them asks afterwards. Every other SIGBUS does
 * what it does without the handler.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

const uint32_t ttrace_source = TTRACE_SOURCE; /* the CRC-32 of this file */

#define MOST 4096 /* files */
static struct { _Atomic uintptr_t begin, end; } watched[MOST];
static _Atomic int faults;

static void on_fault(int number, siginfo_t *info, void *context) {
  (void)context;
  int error = errno;
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  uintptr_t at = (uintptr_t)info->si_addr / page * page;
  if (info->si_code > 0) /* not sent by a process */
    for (int i = 0; i < MOST; i++) {
      uintptr_t begin = watched[i].begin, end = (watched[i].end + page - 1) / page * page;
      if (begin && begin <= at && at < end &&
          mmap((void *)at, end - at, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
        faults++;
        errno = error;
        return;
      }
    }
  struct sigaction plain = {.sa_handler = SIG_DFL};
  sigaction(number, &plain, 0);
  if (info->si_code <= 0) raise(number); /* after this returns; an access is repeated by itself */
  errno = error;
}

/* Whether the handler is there: it never replaces another one. */
int ttrace_guard(void) {
  struct sigaction before, ours = {.sa_flags = SA_SIGINFO | SA_ONSTACK};
  ours.sa_sigaction = on_fault;
  if (sigaction(SIGBUS, 0, &before)) return 0;
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction == on_fault;
  return before.sa_handler == SIG_DFL && !sigaction(SIGBUS, &ours, 0);
}

/* A number for ttrace_forget; -1 if there are too many files. */
int ttrace_watch(uintptr_t begin, uint64_t size) {
  for (int i = 0; i < MOST; i++) {
    uintptr_t none = 0;
    if (atomic_compare_exchange_strong(&watched[i].begin, &none, begin)) {
      watched[i].end = begin + size;
      return i;
    }
  }
  return -1;
}

void ttrace_forget(int number) {
  watched[number].end = 0;
  watched[number].begin = 0;
}

/* How often zeros were read instead of a file. */
int ttrace_faults(void) { return faults; }
