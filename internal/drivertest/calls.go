package drivertest

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Connect serves services on a socket, without an interceptor, until the test ends, and connects to it.
func Connect(t testing.TB, register func(*grpc.Server)) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	check.OK(t, err)
	server := grpc.NewServer()
	register(server)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("unix://"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check.OK(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Twice makes a call twice, and checks that both succeed with the same answer.
func Twice[R, A proto.Message](t testing.TB, call func(context.Context, R) (A, error), r R) A {
	t.Helper()
	first, err := call(t.Context(), r)
	check.OK(t, err)
	second, err := call(t.Context(), r)
	check.OK(t, err)
	if !proto.Equal(first, second) {
		t.Errorf("answered %v, and to the same request %v", first, second)
	}
	return first
}

// Refuses returns a function that changes a right request and checks that a call refuses it: with an error of one kind (of pkg/errdefs) that has the words
// says.
func Refuses[R, A any](t *testing.T, call func(context.Context, R) (A, error), right func() R) func(what string, change func(R), kind error, says string) {
	return func(what string, change func(R), kind error, says string) {
		t.Helper()
		t.Run(what, func(t *testing.T) {
			t.Helper()
			r := right()
			change(r)
			_, err := call(t.Context(), r)
			if !errors.Is(err, kind) || len(errdefs.Kinds(err)) != 1 || !strings.Contains(err.Error(), says) {
				t.Errorf("error %v; want one that is %q, and says %q", err, kind, says)
			}
		})
	}
}
