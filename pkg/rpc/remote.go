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

// Remote is what Serve needs besides for a port that other machines reach.
type Remote struct {
	// TLS is the configuration of the server; all connections use it.
	TLS *tls.Config
	// Allow decides whether the caller with a token may make a call, by its full name (/package.Service/Method), and returns the context for the call.
	// ErrUnavailable if it cannot find that out now; ErrPrecondition if this caller may not make this call; any other error means that no known caller has this
	// token.
	Allow func(ctx context.Context, token, method string) (context.Context, error)
}

// What callers of a Remote can use of this process at most. Beyond that their calls wait, or their connections are closed; connections over which no call was
// allowed yet give way to others (limited).
const (
	remoteConnections = 64
	remoteOfOne       = 8        // connections of one address, which a node may share with its pods: a pod that only connects does not keep others out
	remoteStreams     = 64       // calls at once over one connection
	remoteRequest     = 64 << 10 // bytes; answers are limited by gRPC's default
	remoteHeaders     = 16 << 10 // bytes: a token has some 1 KiB
	remoteIdle        = 5 * time.Minute
	remoteAge         = time.Hour // then new calls use a new connection; after as long again the calls in flight are ended
)

// Both sides send keepalive pings: if the network is cut, a call ends after askEvery and answerWithin.
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
		grpc.StaticStreamWindowSize(remoteRequest), // also for calls that are not allowed yet: gRPC would receive some MiB of each
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

// check returns the context for a call if its caller may make it. Else it returns a gRPC status: Unauthenticated without a known token, PermissionDenied if the
// caller may not, Unavailable if that cannot be found out now.
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

// Anybody can make calls that are refused. So many of these are logged one by one in each refusalsEvery; the rest are counted, and the log has the sum.
const (
	refusalsLogged = 10
	refusalsEvery  = time.Minute
)

// refusals limits what is logged of refused calls. All its methods may be called at once.
type refusals struct {
	log klog.Logger

	mu      sync.Mutex
	since   time.Time
	logged  int // calls since then that were logged
	leftOut int
	later   *time.Timer // logs leftOut
}

// mayLog reports whether this refusal is to be logged. If not, it is counted for sum.
func (r *refusals) mayLog() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); now.Sub(r.since) >= refusalsEvery {
		r.since, r.logged = now, 0
	}
	if r.logged < refusalsLogged {
		r.logged++
		return true
	}
	if r.leftOut++; r.leftOut == 1 {
		r.later = time.AfterFunc(time.Until(r.since.Add(refusalsEvery)), r.sum)
	}
	return false
}

// sum logs how many calls were left out since the last time.
func (r *refusals) sum() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leftOut > 0 {
		r.log.Info("More calls were refused, which are not logged one by one", "calls", r.leftOut)
	}
	r.leftOut = 0
}

// end stops the timer and logs the last sum.
func (r *refusals) end() {
	r.mu.Lock()
	if r.later != nil {
		r.later.Stop()
	}
	r.mu.Unlock()
	r.sum()
}

// Dial returns a connection to a port of another machine that is served with a Remote; it connects with the first call. Each call is sent with what token
// returns then. If the other side does not know that token, token is called again with renew: a unary call is repeated once with the new token, a stream fails,
// and the next one has it. Errors of token are returned as they are. Errors of calls wrap the first sentinel of pkg/errdefs that has their code; ErrUnavailable
// also if the other side cannot be reached, is not the one of the TLS configuration, or refuses this caller; ErrUnknownCall if it does not know the call.
func Dial(address string, config *tls.Config, token func(ctx context.Context, renew bool) (string, error)) (*grpc.ClientConn, error) {
	authorized := func(ctx context.Context, renew bool) (context.Context, error) {
		text, err := token(ctx, renew)
		return metadata.AppendToOutgoingContext(ctx, tokenHeader, tokenPrefix+text), err
	}
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(config)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: askEvery, Timeout: answerWithin}),
		grpc.WithNoProxy(), // the other side is in the cluster
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

// remoteStream gives errors of a stream their sentinels, and renews a token that the other side does not know, for the next stream.
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

// fromStatus gives the error of a call a sentinel again, by its code: of several with that code the first in table. Errors without a sentinel stay such.
func fromStatus(ctx context.Context, address string, err error) error {
	s, ok := status.FromError(err)
	if err == nil || !ok || s.Code() == codes.Unknown { // io.EOF and errors of this side have no status
		return err
	}
	if code := s.Code(); (code == codes.Canceled || code == codes.DeadlineExceeded) && ctx.Err() == nil {
		return &remoteError{errdefs.ErrUnavailable, address + " gave the call up: " + s.Message()} // the caller's context goes on: the other side is ending
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

// remoteError has the text of the other side, which contains that of the sentinel already.
type remoteError struct {
	sentinel error
	message  string
}

func (e *remoteError) Error() string { return e.message }

func (e *remoteError) Unwrap() error { return e.sentinel }
