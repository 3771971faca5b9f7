// Package check has what tests make sure of all the time.
package check

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
