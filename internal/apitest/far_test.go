package apitest

import (
	"context"
	"net"
	"os"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// TestFar: an API server on the host freezes, thaws, is killed and starts again when it is told to. When its client goes, nothing of it is left on the host.
func TestFar(t *testing.T) {
	bin, err := binaries()
	check.OK(t, err)
	host := t.TempDir()
	t.Setenv("TMPDIR", host)
	t.Setenv("ASHLAR_APISERVER", bin)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error)
	go func() { served <- Serve(ctx, listener) }()

	s, err := launchFar(listener.Addr().String(), nil)
	check.OK(t, err)
	answers := func(within time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return s.Redefine(ctx, "volumes.ashlar.dev", func(*unstructured.Unstructured) {})
	}
	check.OK(t, answers(time.Minute))
	for _, how := range []func(testing.TB) func(){s.Freeze, s.Kill} {
		back := how(t)
		if answers(5*time.Second) == nil {
			t.Error("it answers all the same")
		}
		back()
		check.OK(t, answers(time.Minute))
	}
	if left, err := os.ReadDir(host); err != nil || len(left) == 0 {
		t.Errorf("its files are not on the host: %v, %v", left, err)
	}
	s.Stop()
	again, err := launchFar(listener.Addr().String(), nil) // the host ends this one
	check.OK(t, err)
	stop()
	check.OK(t, <-served)
	again.Stop()
	if left, err := os.ReadDir(host); err != nil || len(left) > 0 {
		t.Errorf("left on the host: %v, %v", left, err)
	}
}
