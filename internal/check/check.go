// Package check has assertions that many tests use.
package check

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/keylock"
)

// OK ends the test if there is an error.
func OK(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Code ends the test unless a call has failed with a code, and with a message that has all the words.
func Code(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("got %s, want %s: %v", status.Code(err), code, err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Fatalf("the message says nothing of %q: %v", word, err)
		}
	}
}

// Locked locks keys for the test alone, as soon as they are free. unlock unlocks them.
func Locked(t testing.TB, locks *keylock.Table, keys ...string) (unlock func()) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		unlock, busy := locks.TryLock(keys, nil)
		if unlock != nil {
			return unlock
		}
		if time.Now().After(end) {
			t.Fatalf("%s is never given back", busy)
		}
	}
}
