package rpc

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

var sentinels = map[string]struct {
	err  error
	code codes.Code
}{
	"ErrInvalid":      {errdefs.ErrInvalid, codes.InvalidArgument},
	"ErrNotFound":     {errdefs.ErrNotFound, codes.NotFound},
	"ErrExists":       {errdefs.ErrExists, codes.AlreadyExists},
	"ErrOutOfRange":   {errdefs.ErrOutOfRange, codes.OutOfRange},
	"ErrNoSpace":      {errdefs.ErrNoSpace, codes.ResourceExhausted},
	"ErrLimit":        {errdefs.ErrLimit, codes.ResourceExhausted},
	"ErrInUse":        {errdefs.ErrInUse, codes.FailedPrecondition},
	"ErrPrecondition": {errdefs.ErrPrecondition, codes.FailedPrecondition},
	"ErrBusy":         {errdefs.ErrBusy, codes.Aborted},
	"ErrBadToken":     {errdefs.ErrBadToken, codes.Aborted},
	"ErrDataLoss":     {errdefs.ErrDataLoss, codes.DataLoss},
	"ErrUnavailable":  {errdefs.ErrUnavailable, codes.Unavailable},
	"ErrUnknownCall":  {errdefs.ErrUnknownCall, codes.Unavailable},
	"ErrUnsupported":  {errdefs.ErrUnsupported, codes.FailedPrecondition},
}

// TestEverySentinelHasACode: every sentinel of pkg/errdefs has a code; a new one without a code fails the test.
func TestEverySentinelHasACode(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../errdefs/errdefs.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	declared := 0
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, is := n.(*ast.ValueSpec); is {
			for _, name := range spec.Names {
				if strings.HasPrefix(name.Name, "Err") {
					declared++
					if _, known := sentinels[name.Name]; !known {
						t.Errorf("blockdev.%s is not in the table of this test", name.Name)
					}
				}
			}
		}
		return true
	})
	if declared != len(sentinels) {
		t.Errorf("pkg/errdefs declares %d sentinels, this test has %d", declared, len(sentinels))
	}
	for name, s := range sentinels {
		for how, err := range map[string]error{
			"itself":         s.err,
			"wrapped":        fmt.Errorf("stage volume: %w", fmt.Errorf("%w: details", s.err)),
			"joined":         errors.Join(errors.New("something else"), s.err),
			"with the cause": fmt.Errorf("%w: %w", s.err, status.Error(codes.Unknown, "a cause with a code of its own")),
		} {
			if code := Code(err); code != s.code {
				t.Errorf("%s, %s, is %s, want %s", name, how, code, s.code)
			}
		}
		if st := status.Convert(toStatus(fmt.Errorf("stage: %w", s.err))); st.Code() != s.code || !strings.Contains(st.Message(), s.err.Error()) {
			t.Errorf("%s reaches the caller as %v", name, st)
		}
	}
}

func TestOtherErrors(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		code codes.Code
	}{
		"none":                  {nil, codes.OK},
		"unexpected":            {errors.New("surprise"), codes.Internal},
		"cancelled":             {fmt.Errorf("copy: %w", context.Canceled), codes.Canceled},
		"out of time":           {fmt.Errorf("copy: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		"a read-only directory": {&os.PathError{Op: "mkdir", Path: "/target", Err: syscall.EROFS}, codes.Unavailable},
		"gRPC's own":            {status.Error(codes.ResourceExhausted, "message too large"), codes.ResourceExhausted},
		"unknown method":        {status.Error(codes.Unimplemented, "no such method"), codes.Unimplemented},
		"out of time, and all":  {errors.Join(errdefs.ErrInUse, context.DeadlineExceeded), codes.DeadlineExceeded},
	} {
		if code := Code(c.err); code != c.code {
			t.Errorf("%s is %s, want %s", name, code, c.code)
		}
	}
	if toStatus(nil) != nil {
		t.Error("success is an error")
	}
}

// TestErrorsLeadOn: the message of an error that a person has to act on names the page of its runbook, once.
func TestErrorsLeadOn(t *testing.T) {
	const pages = "https://github.com/ashlar-csi/ashlar/blob/main/docs/runbooks/"
	for want, err := range map[string]error{
		"make: not enough space: 3 of 5 GiB. See " + pages + "pool-full.md": fmt.Errorf("make: %w: 3 of 5 GiB", errdefs.ErrNoSpace),
		"data lost or damaged: it is gone. See " + pages + "data-loss.md":   fmt.Errorf("%w: it is gone", errdefs.ErrDataLoss),
		"operation in progress": errdefs.ErrBusy,
		"not found":             errdefs.ErrNotFound,
	} {
		if got := status.Convert(toStatus(err)).Message(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
