// Package socket gets the overview of a running driver, over the unix socket on which it serves CSI: no other process can look into its pools. The service is
// this project's own, and no part of CSI.
package socket

import (
	"context"
	"encoding/json"
	"fmt"
	"math"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

// Source makes the overview that is served.
type Source func(context.Context) (*overview.Overview, error)

const (
	service = "ashlar.v1.Overview"
	method  = "Get"
)

// handler is the interface that gRPC asks of a service.
type handler interface {
	get(ctx context.Context) (*wrapperspb.BytesValue, error)
}

func (s Source) get(ctx context.Context) (*wrapperspb.BytesValue, error) {
	o, err := s(ctx)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	return wrapperspb.Bytes(text), err
}

// description is a service with one call, Get, which has no request. The answer is the overview as JSON.
var description = grpc.ServiceDesc{ServiceName: service, HandlerType: (*handler)(nil), Methods: []grpc.MethodDesc{{MethodName: method,
	Handler: func(server any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
		request := &emptypb.Empty{}
		if err := decode(request); err != nil {
			return nil, err
		}
		serve := func(ctx context.Context, _ any) (any, error) { return server.(handler).get(ctx) }
		if intercept == nil {
			return serve(ctx, request)
		}
		return intercept(ctx, request, &grpc.UnaryServerInfo{Server: server, FullMethod: "/" + service + "/" + method}, serve)
	}}}}

// Register serves the overviews of a source.
func Register(server grpc.ServiceRegistrar, source Source) {
	server.RegisterService(&description, source)
}

// Ask returns the overview of the driver that serves on the socket at a path. It fails if none answers.
func Ask(ctx context.Context, path string) (*overview.Overview, error) {
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	answer := &wrapperspb.BytesValue{}
	if err := conn.Invoke(ctx, "/"+service+"/"+method, &emptypb.Empty{}, answer, grpc.MaxCallRecvMsgSize(math.MaxInt32)); err != nil {
		return nil, fmt.Errorf("ask the driver on %s (does it run, and is that its --endpoint?): %s", path, status.Convert(err).Message())
	}
	o := &overview.Overview{}
	if err := json.Unmarshal(answer.GetValue(), o); err != nil {
		return nil, fmt.Errorf("what the driver on %s says cannot be read: %w", path, err)
	}
	return o, nil
}
