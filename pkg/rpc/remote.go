package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Remote is what a port has that other machines reach, beyond a socket of this one.
type Remote struct {
	// TLS of the server; without it nothing is served.
	TLS *tls.Config
	// Allow says whether the caller with a token may make a call, in full (/package.Service/Method), and returns the context that the
	// call goes on with. ErrUnavailable: that cannot be found out now; ErrPrecondition: this caller may not; any other error: nobody known
	// has this token.
	Allow func(ctx context.Context, token, method string) (context.Context, error)
}

// What callers from elsewhere can take of this process at the most. Whoever wants more waits, or is hung up on; or a connection over which nobody was let in yet gives way.
const (
	remoteConnections = 64
	remoteOfOne       = 8        // of one address, which a node's pods may share with it: a pod that only connects does not keep others out
	remoteStreams     = 64       // of one connection
	remoteRequest     = 64 << 10 // bytes; answers are as large as gRPC takes them
	remoteHeaders     = 16 << 10 // bytes: a token has some 1 KiB
	remoteIdle        = 5 * time.Minute
	remoteAge         = time.Hour // then calls go over a new connection, and those that go on after as long again are ended
)

// Both sides ask whether the other one is still there: a cable that was cut ends a call after askEvery and answerWithin.
const (
	askEvery     = 20 * time.Second
	answerWithin = 10 * time.Second
)

func (r *Remote) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(credentials.NewTLS(r.TLS)),
		grpc.MaxRecvMsgSize(remoteRequest),
		grpc.MaxHeaderListSize(remoteHeaders),
		grpc.MaxConcurrentStreams(remoteStreams),
		grpc.StaticStreamWindowSize(remoteRequest), // of a call that is not let in yet, too: gRPC would take in some MiB of each
		grpc.StaticConnWindowSize(remoteRequest),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: remoteIdle, MaxConnectionAge: remoteAge, MaxConnectionAgeGrace: remoteAge,
			Time: askEvery, Timeout: answerWithin}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: askEvery / 2}),
	}
}

const (
	tokenHeader = "authorization"
	tokenPrefix = "Bearer "
)

// check fails unless the caller of ctx may make a call, and returns the context that the call goes on with. Its errors have their codes.
func (r *Remote) check(ctx context.Context, method string) (context.Context, error) {
	var token string
	if values := metadata.ValueFromIncomingContext(ctx, tokenHeader); len(values) == 1 {
		token, _ = strings.CutPrefix(values[0], tokenPrefix)
	}
	if token == "" {
		return ctx, status.Error(codes.Unauthenticated, "there is no token with the call")
	}
	allowed, err := r.Allow(ctx, token, method)
	switch {
	case err == nil:
		return allowed, nil
	case errors.Is(err, errdefs.ErrUnavailable), ctx.Err() != nil:
		return ctx, status.Error(codes.Unavailable, err.Error())
	case errors.Is(err, errdefs.ErrPrecondition):
		return ctx, status.Error(codes.PermissionDenied, err.Error())
	}
	return ctx, status.Error(codes.Unauthenticated, err.Error())
}

// What is logged of refused calls, which anybody can make: so many one by one in so long, and of the rest how many there were.
const (
	refusalsTold  = 10
	refusalsEvery = time.Minute
)

// refusals keep who is not let in from filling the log.
type refusals struct {
	log klog.Logger

	mu      sync.Mutex
	since   time.Time
	told    int // since then
	leftOut int
	later   *time.Timer // tells of those
}

// tell reports whether a refusal is logged.
func (r *refusals) tell() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); now.Sub(r.since) >= refusalsEvery {
		r.since, r.told = now, 0
	}
	if r.told < refusalsTold {
		r.told++
		return true
	}
	if r.leftOut++; r.leftOut == 1 {
		r.later = time.AfterFunc(time.Until(r.since.Add(refusalsEvery)), r.sum)
	}
	return false
}

// sum logs how many were left out.
func (r *refusals) sum() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leftOut > 0 {
		r.log.Info("More calls were refused, which are not logged one by one", "calls", r.leftOut)
	}
	r.leftOut = 0
}

// end logs what is to be said yet.
func (r *refusals) end() {
	r.mu.Lock()
	if r.later != nil {
		r.later.Stop()
	}
	r.mu.Unlock()
	r.sum()
}

// Dial prepares a connection to the port of another machine; it connects when the first call is made. A call has the token that
// token returns, which is asked for each time, and once more, with renew, if the other side did not know the one that it got. The
// errors of calls are those of pkg/errdefs: ErrUnavailable also if the other side is not there, is another one than its TLS
// configuration says, or does not let this caller in.
func Dial(address string, config *tls.Config, token func(ctx context.Context, renew bool) (string, error)) (*grpc.ClientConn, error) {
	authorized := func(ctx context.Context, renew bool) (context.Context, error) {
		text, err := token(ctx, renew)
		return metadata.AppendToOutgoingContext(ctx, tokenHeader, tokenPrefix+text), err
	}
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(config)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: askEvery, Timeout: answerWithin}),
		grpc.WithNoProxy(), // it is in the cluster
		grpc.WithDisableServiceConfig(),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, request, reply any, c *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
			for renew := false; ; renew = true {
				calling, err := authorized(ctx, renew)
				if err != nil {
					return err
				}
				err = invoke(calling, method, request, reply, c, options...)
				if renew || status.Code(err) != codes.Unauthenticated {
					return fromStatus(ctx, address, err)
				}
			}
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, description *grpc.StreamDesc, c *grpc.ClientConn, method string, open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
			calling, err := authorized(ctx, false)
			if err != nil {
				return nil, err
			}
			stream, err := open(calling, description, c, method, options...)
			return &remoteStream{stream, address, func() { _, _ = token(ctx, true) }}, fromStatus(ctx, address, err)
		}))
}

// remoteStream gives the errors of a stream their sentinels. A token that the other side does not know is renewed for the next one.
type remoteStream struct {
	grpc.ClientStream
	address string
	renew   func()
}

func (s *remoteStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if status.Code(err) == codes.Unauthenticated {
		s.renew()
	}
	return fromStatus(s.Context(), s.address, err)
}

// fromStatus gives the error of a call its sentinel again. Several share a code: it is the first one of the table.
func fromStatus(ctx context.Context, address string, err error) error {
	s, ok := status.FromError(err)
	if err == nil || !ok || s.Code() == codes.Unknown { // io.EOF is none, and neither are errors of this side
		return err
	}
	if code := s.Code(); (code == codes.Canceled || code == codes.DeadlineExceeded) && ctx.Err() == nil {
		return &remoteError{errdefs.ErrUnavailable, address + " gave the call up: " + s.Message()} // it is ending
	}
	for _, row := range table {
		if row.code == s.Code() {
			return &remoteError{row.err, s.Message()}
		}
	}
	switch s.Code() {
	case codes.Unimplemented:
		return fmt.Errorf("%w: %s: %s; bring both nodes to one version", errdefs.ErrUnknownCall, address, s.Message())
	case codes.Unauthenticated, codes.PermissionDenied:
		return fmt.Errorf("%w: %s does not let this caller in: %s", errdefs.ErrUnavailable, address, s.Message())
	}
	return fmt.Errorf("%s: %s: %s", address, s.Code(), s.Message())
}

// remoteError has the words of the other side, in which those of its sentinel are.
type remoteError struct {
	sentinel error
	message  string
}

func (e *remoteError) Error() string { return e.message }

func (e *remoteError) Unwrap() error { return e.sentinel }
