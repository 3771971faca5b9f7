// Package call has what the services of agents share: calls with one request and one answer about a volume, both JSON, which gRPC sends as bytes. It does
// not know what is asked.
package call

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Request is a request about a volume.
type Request interface {
	// Of returns the ID of the volume, as the request has it.
	Of() string
}

// Parse reads a request, and the ID of its volume. ErrInvalid if it is no request for the service, or has no ID; ErrNotFound if the ID is not that of a
// volume.
func Parse[Q Request](service string, message *wrapperspb.BytesValue) (r Q, id volume.ID, err error) {
	if err := json.Unmarshal(message.GetValue(), &r); err != nil {
		return r, id, fmt.Errorf("%w: this is no request for %s: %w", errdefs.ErrInvalid, service, err)
	}
	id, err = volume.ParseID(r.Of())
	if err == nil && id.Kind != blockdev.Volume {
		err = fmt.Errorf("%w: %s is no volume", errdefs.ErrNotFound, id)
	}
	return r, id, err
}

// Methods returns the calls of a service for gRPC. answers has the function that answers each call, by its name.
func Methods[Q Request, A any](service string, answers map[string]func(context.Context, volume.ID, Q) (A, error)) (methods []grpc.MethodDesc) {
	for name, answer := range answers {
		methods = append(methods, grpc.MethodDesc{MethodName: name, Handler: handler(service, name, answer)})
	}
	return methods
}

func handler[Q Request, A any](service, name string, answer func(context.Context, volume.ID, Q) (A, error)) grpc.MethodHandler {
	handle := func(ctx context.Context, message any) (any, error) {
		r, id, err := Parse[Q](service, message.(*wrapperspb.BytesValue))
		if err != nil {
			return nil, err
		}
		out, err := answer(ctx, id, r)
		if err != nil {
			return nil, err
		}
		text, err := json.Marshal(out)
		return wrapperspb.Bytes(text), err
	}
	return func(server any, ctx context.Context, decode func(any) error, between grpc.UnaryServerInterceptor) (any, error) {
		message := &wrapperspb.BytesValue{}
		if err := decode(message); err != nil {
			return nil, err
		}
		if between == nil {
			return handle(ctx, message)
		}
		return between(ctx, message, &grpc.UnaryServerInfo{Server: server, FullMethod: "/" + service + "/" + name}, handle)
	}
}

// Ask makes a call, and reads the answer into into. Errors are those of the other side (rpc.Dial, Refused); ErrUnavailable if the answer cannot be read.
func Ask(ctx context.Context, agent grpc.ClientConnInterface, service, name string, r Request, into any) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	reply := &wrapperspb.BytesValue{}
	if err := agent.Invoke(ctx, "/"+service+"/"+name, wrapperspb.Bytes(text), reply); err != nil {
		return Refused(err, name, r.Of())
	}
	if json.Unmarshal(reply.GetValue(), into) != nil {
		return fmt.Errorf("%w: the answer to %s of volume %s cannot be read", errdefs.ErrUnavailable, name, r.Of()) // it may hold a secret
	}
	return nil
}

// Refused returns ErrPrecondition for the ErrInUse of a call about a volume: the two have the same gRPC code, so what the other side had arrives as ErrInUse
// in either case. It returns any other error as it is.
func Refused(err error, name, of string) error {
	if errors.Is(err, errdefs.ErrInUse) {
		return errdefs.Recast(errdefs.ErrPrecondition, err, "%s of volume %s", name, of)
	}
	return err
}
