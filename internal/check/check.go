// Package check has what tests make sure of all the time.
package check

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/keylock"
)

// OK ends the test with an error.
func OK(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Code makes sure that a call ended with a code, and with a message that has all the words.
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

// Locked has keys for the test alone, as soon as those have given them back who had them. It returns what gives them back in turn.
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
